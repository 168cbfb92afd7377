"""Tables of measured rows. `bench`, `eval` and `demo` choose from the same columns."""

from typing import Any

from rich.table import Table

from peagle.bench.summary import Cell

COLUMNS = {  # heading: a field of the row, and its form; others are shown as they are
    "tok/s": ("output_tps", "{:.1f}"),
    "before": ("before", "{:.1f}"),
    "after": ("output_tps", "{:.1f}"),
    "ratio": ("ratio", "{:.2f}"),
    "×": ("speed_up", "{:.2f}"),
    "95 %": ("speed_up_95", "{0[0]:.2f}–{0[1]:.2f}"),
    "nodes": ("nodes", "{:.1f}"),
    "AL": ("acceptance_length", "{:.2f}"),
    "acceptance length": ("acceptance_length", "{:.2f}"),
    "tokens / forward": ("tokens_per_forward", "{:.2f}"),
    "TTFT": ("ttft_ms_p50", "{:.0f}"),
    "TPOT": ("tpot_ms_p50", "{:.1f}"),
}


def rows_table(rows: list[dict[str, Any]], *headings: str, **about: Any) -> Table:
    """A table with some of the columns; "-" stands where nothing was measured."""
    table = Table(*headings, **about)
    for row in rows:
        shown = row | _texts(row)
        table.add_row(*(_cell(heading, shown) for heading in headings))
    return table


def _cell(heading: str, row: dict[str, Any]) -> str:
    field, form = COLUMNS.get(heading, (heading.replace(" ", "_"), "{}"))
    value = row.get(field)
    return "-" if value is None else form.format(value)


def _texts(row: dict[str, Any]) -> dict[str, str]:
    """Values that are made of several fields."""
    cell = Cell.from_row(row)
    shares = " ".join(f"{share:.2f}" for share in row["accepted_per_position"])
    texts = {"drafts": str(cell.drafting), "load": cell.load, "per_position": shares}
    if "same" in row:
        texts["same"] = f"{row['same']}/{row['compared']}"
    elif row.get("same_p") is not None:
        texts["same"] = f"p = {row['same_p']:.2f}"
    return texts
