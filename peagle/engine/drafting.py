"""The drafts of a round as one value. No torch here."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from peagle.errors import InputError, check_at_least

if TYPE_CHECKING:
    from peagle.methods.base import Method

ADAPTIVE = "adaptive"  # its name in tables and results
AUTO_NODES = 32  # maximum size of a draft tree where the budget decides
MAX_NODES = 256  # maximum size that `nodes` may ask for


@dataclass(frozen=True, slots=True)
class Drafting:
    """Drafts of `method` ("none", "lookup" or a head's): chains of `k` tokens, or trees of `nodes`
    nodes, or (both None) trees as large as pays, chosen round by round.

    `lookup`: the tokens that followed when the newest ones occurred before are drafted, too.
    """

    method: str = "none"
    k: int | None = 0  # 0: nothing is drafted; None: trees
    nodes: int | None = None
    lookup: bool = False

    @classmethod
    def resolve(
        cls, method: "Method | None", k: int | None, nodes: int | None, lookup: bool | None
    ) -> "Drafting":
        """The drafting of an LLM's options, with a head of `method` or without a head. Raises
        InputError for options that exclude each other."""
        check_at_least(1, k=k, nodes=nodes)
        if nodes is not None and nodes > MAX_NODES:
            raise InputError(f"must be at most {MAX_NODES}", field="nodes", value=nodes)
        if k is not None and (nodes is not None or lookup):
            field, value = ("lookup", True) if nodes is None else ("nodes", nodes)
            why = "needs trees, `k` asks for chains"
            raise InputError(why, field=field, value=value, fix="leave out one of them")
        trees = lookup is not False
        if method is None and not (trees and k is None):
            return cls()
        if nodes is not None and method is not None and not (method.parallel or lookup):
            why = f"{method.title} drafts chains"
            fix = "give `k`, or a head of another method"
            raise InputError(why, field="nodes", value=nodes, fix=fix)
        name = "lookup" if method is None else method.name
        return cls(name, k, nodes, trees and k is None)

    @property
    def adaptive(self) -> bool:
        """The budget decides every round."""
        return self.k is None and self.nodes is None

    @property
    def max_nodes(self) -> int | None:
        """Maximum number of nodes of a draft tree; None: chains."""
        return self.nodes or AUTO_NODES if self.k is None else None

    @property
    def options(self) -> dict[str, Any]:
        """The arguments `k`, `nodes` and `lookup` of an LLM."""
        return {"k": self.k or None, "nodes": self.nodes, "lookup": self.lookup}

    @property
    def row(self) -> dict[str, Any]:
        """Its part of a row in a result file."""
        k = ADAPTIVE if self.adaptive else self.k
        return {"method": self.method, "k": k, "max_nodes": self.nodes, "lookup": self.lookup}

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> "Drafting":
        """The inverse of `row`. Rows of older reports name no trees and no lookup."""
        k = None if row["k"] == ADAPTIVE else row["k"]
        return cls(row.get("method", ""), k, row.get("max_nodes"), bool(row.get("lookup")))

    def __str__(self) -> str:
        size = f"K = {self.k}" if self.k else "-"
        if self.k is None:
            size = f"{self.nodes} nodes" if self.nodes else ADAPTIVE
        return f"{size} + lookup" if self.lookup and self.method != "lookup" else size
