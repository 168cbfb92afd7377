"""The drafts of a round as one value. No torch here."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from peagle.errors import InputError, check_at_least

if TYPE_CHECKING:
    from peagle.methods.base import Method

Mode = Literal["none", "chain", "tree", "auto"]
ADAPTIVE = "adaptive"  # the name of "auto" in tables and results
AUTO_NODES = 32  # maximum size of a draft tree where the budget decides
MAX_NODES = 256  # maximum size that `nodes` may ask for


@dataclass(frozen=True, slots=True)
class Drafting:
    """Drafts of `method` ("none", "lookup" or a head's): nothing, a chain of `size` tokens, a tree
    of `size` nodes, or ("auto") as much as pays, chosen round by round.

    `lookup`: the tokens that followed when the newest ones occurred before are drafted, too.
    """

    method: str = "none"
    mode: Mode = "none"
    size: int = 0  # 0 where it is chosen every round
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
        if k is not None:
            return cls(name, "chain", k)
        return cls(name, "auto" if nodes is None else "tree", nodes or 0, trees)

    @property
    def chain(self) -> int | None:
        """Length of the chains that are drafted; None where drafts are no chains of one length."""
        return self.size if self.mode == "chain" else None

    @property
    def max_nodes(self) -> int | None:
        """Maximum number of nodes of a draft tree; None: chains."""
        if self.mode in ("none", "chain"):
            return None
        return self.size or AUTO_NODES

    @property
    def options(self) -> dict[str, Any]:
        """The arguments `k`, `nodes` and `lookup` of an LLM."""
        nodes = self.size if self.mode == "tree" else None
        return {"k": self.chain, "nodes": nodes, "lookup": self.lookup}

    @property
    def row(self) -> dict[str, Any]:
        """Its part of a row in a result file."""
        k = {"none": 0, "chain": self.size, "tree": None, "auto": ADAPTIVE}[self.mode]
        nodes = self.options["nodes"]
        return {"method": self.method, "k": k, "max_nodes": nodes, "lookup": self.lookup}

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> "Drafting":
        """The inverse of `row`. Rows of older reports name no trees and no lookup."""
        method = row.get("method", "")
        k = row["k"]
        lookup = bool(row.get("lookup"))
        if nodes := row.get("max_nodes"):
            return cls(method, "tree", nodes, lookup)
        if k == ADAPTIVE:
            return cls(method, "auto", 0, lookup)
        return cls(method, "chain" if k else "none", k or 0, lookup)

    def __str__(self) -> str:
        sizes = {"none": "-", "chain": f"K = {self.size}", "auto": ADAPTIVE}
        size = sizes.get(self.mode, f"{self.size} nodes")
        return f"{size} + lookup" if self.lookup and self.method != "lookup" else size
