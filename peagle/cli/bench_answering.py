"""Who answers in a benchmark: the engine in this process, a shape without weights, or a server."""

import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, ExitStack
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from peagle.catalog import head_place
from peagle.cli.common import announced_device, screen
from peagle.errors import InputError

ADAPTIVE = "adaptive"
AT_RANDOM = 16  # requests that run together, where they come at random times


@dataclass(frozen=True, slots=True)
class Answering:
    """Who answers, how, and with which heads."""

    device: str
    engine: str
    opened: Callable[..., AbstractAsyncContextManager[Any]]  # of a cell
    heads: dict[str, str]  # by method
    close: Callable[[], None] = lambda: None
    apart: bool = False  # methods and K one after the other, instead of interleaved

    def groups(self, results: list[Any]) -> list[list[Any]]:
        """What is interleaved."""
        if not self.apart:
            return [results]
        kinds = dict.fromkeys((r.cell.method, r.cell.k) for r in results)
        return [[r for r in results if (r.cell.method, r.cell.k) == kind] for kind in kinds]


def _places(target: str, named: dict[str, str | None], cells: list[Any]) -> dict[str, str]:
    """Folder or hub id of the head of every method: as named, or the catalog's."""
    heads = dict[str, str]()
    for method in {cell.method for cell in cells} - {"none"}:
        place = named[method] or head_place(target, method)
        if place is None:
            raise InputError(f"no {method} head is known for {target}: name one with --{method}")
        heads[method] = place
    return heads


def native(
    target: str,
    named: dict[str, str | None],
    options: dict[str, Any],
    sampled: dict[str, Any],
    cells: list[Any],
) -> Answering:
    """The engine in this process; all heads stay loaded."""
    from peagle.bench.native import Native
    from peagle.bench.side_by_side import device_name
    from peagle.cli.common import open_llm
    from peagle.engine.params import SamplingParams
    from peagle.methods.load import find_head

    heads = _places(target, named, cells)
    folders = {method: find_head(place) for method, place in heads.items()}
    force = options.pop("force")
    llm = open_llm(target, None, "none", None, **options)
    drafters: dict[str, Any] = {"none": None}
    for method, folder in folders.items():
        drafters[method] = llm.load_head(folder, force=force)
        if (found := drafters[method].config.method) != method:
            raise InputError(f"--{method} {heads[method]}: is a {found} head")

    loads = count()  # each draws by seeds of its own

    def opened(cell: Any) -> Native:
        k = None if cell.k in (0, ADAPTIVE) else cell.k
        batch = cell.concurrency or AT_RANDOM
        used = llm.use(drafters[cell.method], k, max_batch=batch)
        seed = 10_000 * next(loads)
        return Native(used, SamplingParams(temperature=cell.temperature, seed=seed, **sampled))

    return Answering(device_name(), "native", opened, heads)


def synthetic(
    target: str,
    device: str,
    sampled: dict[str, Any],
    prompt_tokens: int,
    acceptance: str,
    cells: list[Any],
) -> Answering:
    """A shape with random weights."""
    from peagle.bench.side_by_side import device_name
    from peagle.bench.synthetic import Synthetic, profile, random_drafter, random_target
    from peagle.engine.llm import LLM
    from peagle.engine.params import SamplingParams

    device = announced_device(device)
    try:
        given = {m: float(a) for m, a in (part.split("=") for part in acceptance.split(","))}
    except ValueError as error:
        raise InputError(f"--acceptance {acceptance!r}: expected p-eagle=3.9,eagle3=3.0") from error
    wanted = {cell.method for cell in cells} - {"none"}
    if missing := sorted(wanted - given.keys()):
        raise InputError(f"--acceptance {acceptance!r}: says nothing of {missing[0]}")
    if any(cell.k == ADAPTIVE or cell.temperature for cell in cells):
        raise InputError("--random-weights: pin --k, and leave --temperature at 0")
    with screen.status(f"drawing weights of {target}"):
        drawn = random_target(target, device)
        drafters: dict[str, Any] = {"none": None}
        drafters |= {method: random_drafter(drawn, method) for method in wanted}
    most = max(cell.concurrency for cell in cells) or AT_RANDOM
    llm = LLM(drawn, kv_tokens=most * (prompt_tokens + sampled["max_tokens"] + 64))
    accepted = {method: profile(length) for method, length in given.items()}

    def opened(cell: Any) -> Synthetic:
        batch = cell.concurrency or AT_RANDOM
        used = llm.use(drafters[cell.method], cell.k or None, max_batch=batch)
        profiled = accepted.get(cell.method, [])
        return Synthetic(used, SamplingParams(**sampled), prompt_tokens, profiled)

    named = {method: f"random, acceptance length {given[method]} at K = 7" for method in wanted}
    return Answering(device_name(), "native", opened, named)


def server(
    model: str | None,
    url: str,
    api_key: str | None,
    hardware: str | None,
    sampled: dict[str, Any],
    cells: list[Any],
) -> Answering:
    """Somebody's server: its method and K are what it was started with."""
    from peagle.bench.client import Server, served_model

    if len({(cell.method, cell.k) for cell in cells}) > 1:
        why = "a server has one: name it (--methods p-eagle --k 7)"
        raise InputError(f"--url {url}: several methods or K, {why}")
    named = model or served_model(url, api_key)

    loads = count()  # each draws by seeds of its own

    def opened(cell: Any) -> Server:
        body = {"model": named, "temperature": cell.temperature, "seed": 10_000 * next(loads)}
        body |= sampled
        return Server(url, body, api_key)

    return Answering(hardware or "not told (--hardware)", url, opened, {})


def vllm(
    target: str,
    named: dict[str, str | None],
    options: dict[str, Any],
    python: Path | None,
    sampled: dict[str, Any],
    cells: list[Any],
) -> Answering:
    """vLLM on this machine, a server a method and K, one after another."""
    from peagle.bench.client import Server
    from peagle.bench.side_by_side import device_name
    from peagle.vllm.process import look
    from peagle.vllm.server import serving

    installed = look(python or Path(sys.executable))
    allowed = {"device": ("auto", "cpu" if installed.cpu else "cuda"), "quantize": (None,)}
    for name, values in allowed.items():
        if options[name] not in values:
            raise InputError(f"--{name} {options[name]}: vLLM decides by itself, leave it out")
    if any(cell.k == ADAPTIVE for cell in cells):
        raise InputError("--engine vllm: it cannot choose K every round: give numbers, as --k 7")
    heads = _places(target, named, cells)
    most = max(cell.concurrency for cell in cells) or AT_RANDOM
    stack, running, loads = ExitStack(), dict[tuple[str, int], str](), count()

    def opened(cell: Any) -> Server:
        kind = cell.method, cell.k
        if kind not in running:
            stack.close()
            running.clear()
            line = [target, "--method", cell.method, "--max-batch", str(most)]
            line += ["--dtype", options["dtype"], "--served-model-name", "bench"]
            line += ["--force"] if options["force"] else []
            if cell.method != "none":
                line += ["--head", heads[cell.method], "--k", str(cell.k)]
            if options["chat_template"]:
                line += ["--chat-template", options["chat_template"]]
            running[kind] = stack.enter_context(serving(line, python))
        body = {"model": "bench", "temperature": cell.temperature, "seed": 10_000 * next(loads)}
        return Server(running[kind], body | sampled)

    engine = f"{installed.package} {installed.version}"
    return Answering(device_name(), engine, opened, heads, stack.close, apart=True)
