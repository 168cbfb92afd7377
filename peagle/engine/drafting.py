"""The drafts of a round as one value. No torch here."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from peagle.errors import InputError

Mode = Literal["none", "chain", "tree", "auto"]
ADAPTIVE = "adaptive"  # the name of "auto" in tables and results
AUTO_NODES = 32  # of a draft tree, at most where the budget decides
MAX_NODES = 256  # that may be asked for


@dataclass(frozen=True, slots=True)
class Drafting:
    """Drafts of `method` ("none", "lookup" or a head's): nothing, a chain of `size` tokens, a tree
    of `size` nodes, or ("auto") as much as pays, chosen round by round.

    `lookup`: what followed when the newest tokens occurred before is drafted, too.
    """

    method: str = "none"
    mode: Mode = "none"
    size: int = 0  # 0 where it is chosen every round
    lookup: bool = False

    @property
    def max_nodes(self) -> int | None:
        """Nodes of a draft tree, at most; None: chains."""
        if self.mode in ("none", "chain"):
            return None
        return self.size or AUTO_NODES

    @property
    def options(self) -> dict[str, Any]:
        """The arguments `k`, `nodes` and `lookup` of an LLM."""
        k = self.size if self.mode == "chain" else None
        nodes = self.size if self.mode == "tree" else None
        return {"k": k, "nodes": nodes, "lookup": self.lookup}

    @property
    def row(self) -> dict[str, Any]:
        """Its part of a row in a result file."""
        k = {"none": 0, "chain": self.size, "tree": None, "auto": ADAPTIVE}[self.mode]
        nodes = self.options["nodes"]
        return {"method": self.method, "k": k, "max_nodes": nodes, "lookup": self.lookup}

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> "Drafting":
        """The inverse of `row`. Rows of older reports name no trees and no lookup."""
        method, k, lookup = row.get("method", ""), row["k"], bool(row.get("lookup"))
        if nodes := row.get("max_nodes"):
            return cls(method, "tree", nodes, lookup)
        if k == ADAPTIVE:
            return cls(method, "auto", 0, lookup)
        return cls(method, "chain" if k else "none", k or 0, lookup)

    def __str__(self) -> str:
        sizes = {"none": "-", "chain": f"K = {self.size}", "auto": ADAPTIVE}
        size = sizes.get(self.mode, f"{self.size} nodes")
        return f"{size} + lookup" if self.lookup and self.method != "lookup" else size


def check_options(k: int | None, nodes: int | None) -> None:
    """Raises InputError for options that nothing can be drafted by."""
    for name, value in {"k": k, "nodes": nodes}.items():
        if value is not None and value < 1:
            raise InputError(f"{name} {value}: must be at least 1")
    if nodes is not None and k is not None:
        raise InputError(f"nodes {nodes}: a tree, but `k` {k} asks for a chain: give one of both")
    if nodes is not None and nodes > MAX_NODES:
        raise InputError(f"nodes {nodes}: must be at most {MAX_NODES}")
