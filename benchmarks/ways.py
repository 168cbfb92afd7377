"""The ways to decode that `trees.py` compares, by name."""

from common import catalog_k

from peagle.bench.summary import Cell

ALONE, DEFAULT = "alone", "P-EAGLE"
NODES = 12  # of the pinned tree, one request at a time
LOAD_NODES = (4, 8, 12)  # at several loads


def chain(method: str, concurrency: int = 1) -> Cell:
    """The catalog's K."""
    return Cell(method, catalog_k()[method], concurrency, 0.0)


def tree(nodes: int, concurrency: int = 1, *, lookup: bool = True) -> Cell:
    """Of P-EAGLE's."""
    return Cell("p-eagle", None, concurrency, 0.0, nodes, lookup)


def adaptive(method: str, concurrency: int = 1, *, lookup: bool = True) -> Cell:
    """What the budget chooses."""
    return Cell(method, "adaptive", concurrency, 0.0, lookup=lookup)


def one_at_a_time() -> dict[str, Cell]:
    """The ways that are compared at c = 1."""
    return {
        ALONE: Cell("none", 0, 1, 0.0),
        "EAGLE-3 chain": chain("eagle3"),
        "EAGLE-3 + lookup": adaptive("eagle3"),
        "P-EAGLE chain": chain("p-eagle"),
        "P-EAGLE tree": tree(NODES, lookup=False),
        "P-EAGLE tree + lookup": tree(NODES),
        DEFAULT: adaptive("p-eagle"),
        "lookup": adaptive("lookup"),
    }


def for_edits() -> dict[str, Cell]:
    """With and without lookup, the budget decides."""
    kept = (ALONE, "EAGLE-3 + lookup", DEFAULT, "lookup")
    ways = {name: way for name, way in one_at_a_time().items() if name in kept}
    return ways | {"P-EAGLE, no lookup": adaptive("p-eagle", lookup=False)}


def under_load(concurrency: int) -> dict[str, Cell]:
    """The default, and what it may be pinned to."""
    return {
        ALONE: Cell("none", 0, concurrency, 0.0),
        DEFAULT: adaptive("p-eagle", concurrency),
        **{f"tree of {n} + lookup": tree(n, concurrency) for n in LOAD_NODES},
        "P-EAGLE chain": chain("p-eagle", concurrency),
    }
