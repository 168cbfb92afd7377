"""The protocol of drafting methods: build a head, draft with it, train it, write its keys.

Shapes: B requests, T slots, E elements, R rows, N tokens, D drafter hidden, F·E_t target features,
V draft vocabulary.

To add one, see docs/adding-a-method.md.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from torch import Tensor

from peagle.model.attention import Attend
from peagle.model.config import DrafterConfig
from peagle.model.drafter import Drafter

if TYPE_CHECKING:  # training needs no backend
    from peagle.backends.base import DrafterModel
    from peagle.backends.kv_cache import KVCache

Dialect = Literal["native", "vllm", "speculators"]


class NewSlots(NamedTuple):
    """Newly verified slots of one request; the last one predicts the next token."""

    blocks: Sequence[int]  # of KV cache, room for the drafted slots included
    start: int
    ids: list[int]  # the token of each slot
    depth: int  # tokens to draft; 0: the slots are only run


class DraftPass(NamedTuple):
    """The inputs of drafting for B requests."""

    model: "DrafterModel"
    cache: "KVCache"
    slots: Sequence[NewSlots]
    features: Tensor  # (T, F·E_t) of the target, of all slots


class DraftStates(NamedTuple):
    """Hidden states of slots that predict draft tokens."""

    owners: list[int]  # (R,) index of each row's request
    normed: Tensor  # (R, D) of which `Method.logits` makes logits


DraftSteps = Generator[DraftStates, Tensor, None]


def advance(steps: DraftSteps, tokens: Tensor) -> DraftStates | None:
    """The next states of a draft that goes on with the target ids (R,); None at its end."""
    try:
        return steps.send(tokens)
    except StopIteration:
        return None


class Elements(NamedTuple):
    """Training elements, sorted by depth, then anchor; both (E,) int64. Element (a, d) is the slot
    d positions after the one with token x[a+1] and feature h[a]; it predicts x[a+d+2]."""

    anchor: Tensor
    depth: Tensor


class TrainingPass(NamedTuple):
    """The inputs of a training forward."""

    ids: Tensor  # (N,) tokens of the sequence
    positions: Tensor  # (N,) of each token in its document
    features: Tensor  # (N, F·E_t) of the target
    elements: Elements
    attend: Callable[[Sequence[int]], Attend]  # by the number of elements of each forward


class Method(Protocol):
    """A way to draft. `name` is what configs and the command line call it."""

    name: str
    title: str
    parallel: bool  # all draft tokens come from one forward, over mask tokens
    conditional: bool  # `logits` depend on the token before; only in a parallel method
    layers: int  # default of a new head

    def build(self, config: DrafterConfig) -> Drafter:
        """A head without weights. Raises InputError for a config that is not of this method."""

    def draft(self, inputs: DraftPass) -> DraftSteps:
        """Run new slots, and yield the states that predict draft tokens. Keys of drafted slots need
        not be kept.

        A parallel method yields once: all states, in order of request and depth. Any other method
        yields once a depth, and is sent the target ids (R,) of the tokens that it runs next.
        """

    def passes(self, new: float, deeper: Sequence[float]) -> list[float]:
        """Rows of each forward of `draft`. `new`: verified slots to run; `deeper`: for each depth
        after the first, the number of requests that draft there."""

    def train_forward(self, drafter: Drafter, inputs: TrainingPass) -> Tensor:
        """Normed hidden states (E, D) of all elements."""

    def logits(self, drafter: Drafter, normed: Tensor, previous_ids: Tensor | None) -> Tensor:
        """Draft logits (R, V) of rows (R, D), given the target ids (R,) of the token before each
        predicted one; None: not known, in a method whose logits do not depend on it."""

    def claims(self, raw: Mapping[str, Any]) -> bool:
        """Whether a head may be of this method, by its config.json. Of several methods that claim
        it, the one that `peagle.method` names is taken, else the first in the registry."""

    def export(self, config: DrafterConfig, dialect: Dialect) -> dict[str, Any]:
        """Keys of config.json that other tools know the method by. Raises InputError where the
        tools of the dialect would not run the head as it is."""
