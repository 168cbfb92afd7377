"""Pictures of a measurement, by name. Each takes the report's rows; matplotlib draws."""

from collections.abc import Callable
from typing import Any

Rows = list[dict[str, Any]]
COLOURS = {"none": "#8c8c8c", "eagle3": "#d98324", "p-eagle": "#2f6fb0"}
NAMES = {"none": "none", "eagle3": "EAGLE-3", "p-eagle": "P-EAGLE"}


def draw(rows: Rows) -> dict[str, Any]:
    """Figures by name: those that these rows have something for."""
    from matplotlib.figure import Figure  # noqa: PLC0415 (an extra; no global state)

    pictures: dict[str, Callable[[Any, Rows], bool]] = {
        "throughput": throughput,
        "acceptance": acceptance,
        "positions": positions,
        "latency": latency,
        "pareto": pareto,
    }
    drawn = {}
    for name, picture in pictures.items():
        figure = Figure(figsize=(7, 4), layout="constrained")
        if picture(figure.subplots(), rows):
            drawn[name] = figure
    return drawn


def best(rows: Rows) -> Rows:
    """Of every method and load, the row of the K that is fastest."""
    found: dict[tuple[str, int, float], dict[str, Any]] = {}
    for row in rows:
        key = (row["method"], row["concurrency"], row["temperature"])
        if key not in found or row["output_tps"] > found[key]["output_tps"]:
            found[key] = row
    return list(found.values())


def throughput(axes: Any, rows: Rows) -> bool:
    """Bars of tokens a second at each load; on them, times the target alone."""
    rows = [row for row in best(rows) if not row["temperature"]]
    loads = sorted({row["concurrency"] for row in rows})
    methods = [method for method in NAMES if any(row["method"] == method for row in rows)]
    width = 0.8 / max(1, len(methods))
    for row in rows:
        shift = methods.index(row["method"]) * width - 0.4 + width / 2
        x, tall = loads.index(row["concurrency"]) + shift, row["output_tps"]
        low, high = row["output_tps_95"] or (tall, tall)
        spread = [[max(0.0, tall - low)], [max(0.0, high - tall)]]
        axes.bar(x, tall, width, color=COLOURS[row["method"]], yerr=spread, ecolor="#444444")
        if row["method"] != "none" and row.get("speed_up"):
            axes.annotate(f"{row['speed_up']:.2f}×\nK {row['k']}", (x, high), ha="center",
                          va="bottom", fontsize=7)  # fmt: skip
    axes.set_xticks(range(len(loads)), [f"c = {load}" if load else "random" for load in loads])
    axes.set(ylabel="output tokens a second", title="Throughput, best K; × the target alone")
    axes.margins(y=0.15)
    _legend(axes, methods)
    return bool(rows)


def acceptance(axes: Any, rows: Rows) -> bool:
    """Acceptance length against K, pinned."""
    rows = [r for r in rows if r["acceptance_length"] and isinstance(r["k"], int)]
    for method, name in NAMES.items():
        by_k: dict[int, list[float]] = {}
        for row in rows:
            if row["method"] == method:
                by_k.setdefault(row["k"], []).append(row["acceptance_length"])
        if by_k:
            means = [sum(by_k[k]) / len(by_k[k]) for k in sorted(by_k)]
            axes.plot(sorted(by_k), means, "o-", color=COLOURS[method], label=name)
    axes.set(xlabel="K", ylabel="acceptance length", title="Acceptance length")
    several = len({row["k"] for row in rows}) > 1
    if several:
        axes.legend()
    return several


def positions(axes: Any, rows: Rows) -> bool:
    """Share of rounds whose i-th draft token stood, of the deepest K of each method."""
    drawn = False
    for method, name in NAMES.items():
        mine = [row for row in rows if row["method"] == method and row["accepted_per_position"]]
        if mine:
            shares = max((row["accepted_per_position"] for row in mine), key=len)
            places = range(1, len(shares) + 1)
            axes.plot(places, shares, "o-", color=COLOURS[method], label=name)
            drawn = True
    axes.set(xlabel="draft token", ylabel="share of rounds", ylim=(0, 1),
             title="Accepted, by position")  # fmt: skip
    if drawn:
        axes.legend()
    return drawn


def latency(axes: Any, rows: Rows) -> bool:
    """Milliseconds to the first token and a token: median, and a line to the 99th percentile."""
    rows = [row for row in best(rows) if row["tpot_ms_p50"]]
    for place, row in enumerate(rows):
        for shift, name, hatch in ((-0.2, "ttft", "//"), (0.2, "tpot", "")):
            half, most = row[f"{name}_ms_p50"], row[f"{name}_ms_p99"]
            axes.bar(place + shift, half, 0.38, color=COLOURS[row["method"]], hatch=hatch,
                     edgecolor="white", yerr=[[0], [max(0, most - half)]])  # fmt: skip
    names = [f"{NAMES[row['method']]}\nc = {row['concurrency']}" for row in rows]
    axes.set_xticks(range(len(rows)), names, fontsize=7)
    axes.set(yscale="log", ylabel="ms", title="TTFT (hatched) and TPOT: median, to p99")
    return bool(rows)


def pareto(axes: Any, rows: Rows) -> bool:
    """What one user sees against what the machine yields."""
    rows = [row for row in best(rows) if row["tpot_ms_p50"]]
    for method, name in NAMES.items():
        mine = sorted((r for r in rows if r["method"] == method), key=lambda r: r["concurrency"])
        if mine:
            axes.plot([1000 / r["tpot_ms_p50"] for r in mine], [r["output_tps"] for r in mine],
                      "o-", color=COLOURS[method], label=name)  # fmt: skip
    axes.set(xlabel="tokens a second for one user", ylabel="tokens a second for all",
             title="Pareto")  # fmt: skip
    several = len({row["concurrency"] for row in rows}) > 1
    if several:
        axes.legend()
    return several


def _legend(axes: Any, methods: list[str]) -> None:
    from matplotlib.patches import Patch  # noqa: PLC0415

    axes.legend(handles=[Patch(color=COLOURS[m], label=NAMES[m]) for m in methods], loc="best")
