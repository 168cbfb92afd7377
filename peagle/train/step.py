"""One sequence: run the target, run the drafter on a segment's elements, compare.

Shapes: N tokens, E elements, D drafter hidden, F·E_target features.
"""

from collections.abc import Callable, Iterator
from copy import copy
from functools import cache, partial
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

from peagle.methods.base import Elements, TrainingPass
from peagle.methods.registry import method_of
from peagle.model.attention import Attend, AttentionSpec, CausalAttend
from peagle.model.drafter import Drafter
from peagle.model.layers import FirstLayer
from peagle.model.padding import pad_rows
from peagle.model.target import Target, TargetOutput
from peagle.train.block_attention import BlockAttend
from peagle.train.loss import ChunkedDivergence, LossChunk
from peagle.train.mask import FlexAttend, block_mask, visible
from peagle.train.partition import Segment

LOSS_ROWS = 512  # rows of logits alive at once, on a CPU
LOSS_LOGITS = 1 << 26  # logits alive at once on a GPU, which wants large products


class Sequence(NamedTuple):
    """Documents packed one behind the other; all (N,)."""

    ids: Tensor
    supervised: Tensor
    documents: Tensor  # number of the document, ascending

    @property
    def positions(self) -> Tensor:
        """Place of each token in its own document."""
        return torch.arange(len(self.ids), device=self.ids.device) - self.starts

    @property
    def starts(self) -> Tensor:
        """Index of the first token of each token's document."""
        return torch.searchsorted(self.documents, self.documents)


class StepResult(NamedTuple):
    """Sums over the elements trained."""

    loss: Tensor  # scalar, with gradient, each element by its weight; divide by the chains
    correct: Tensor  # (depths,) elements whose most likely token is the document's
    supervised: Tensor  # (depths,) elements


class Trainee(nn.Module):
    """Drafter and loss in one forward: what data parallelism wraps."""

    def __init__(
        self, drafter: Drafter, target: Target, decay: float = 1.0, *, bf16: bool = True
    ) -> None:
        super().__init__()
        self.drafter, self.target, self.bf16 = drafter, target, bf16
        self.decay = decay
        # Made when the weights are where they stay: a target that is sharded moves.
        self.target_logits: Callable[[Tensor], Tensor] | None = None

    def forward(self, sequence: Sequence, said: TargetOutput, segment: Segment) -> StepResult:
        """`said` is `run_target`'s view of the sequence."""
        with torch.autocast(sequence.ids.device.type, torch.bfloat16, enabled=self.bf16):
            normed = run_drafter(self.drafter, sequence, said.features, segment.elements)
            return self.compare(sequence, said.hidden, segment, normed)

    def compare(
        self, sequence: Sequence, hidden: Tensor, segment: Segment, normed: Tensor
    ) -> StepResult:
        """Loss and accuracy of every supervised element the segment owns, from the target's hidden
        states (N, E_target) and the drafter's (E, D).

        Element (a, d) is compared with the target's distribution at a + d + 1. Elements are taken
        in the order of that position, so that the target's logits over the draft vocabulary are
        computed once a position, and exist only for a chunk.
        """
        drafter = self.drafter
        if self.target_logits is None:
            self.target_logits = logits_of(self.target, drafter.target_ids)
        target_logits = self.target_logits
        anchor, depth = segment.elements
        trained = segment.own & supervised_elements(sequence, segment.elements)
        chosen = trained.nonzero()[:, 0]
        chosen = chosen[(anchor + depth)[chosen].argsort(stable=True)]
        at = (anchor + depth + 1)[chosen]
        # A chain ends at its first wrong token, so later ones count less often.
        weights = self.decay ** depth[chosen].float()

        def chunks() -> Iterator[LossChunk]:
            size = LOSS_ROWS if chosen.is_cpu else LOSS_LOGITS // len(drafter.target_ids)
            split = (each.split(size) for each in (chosen, at, weights))
            for rows, positions, of_rows in zip(*split, strict=True):
                unique, index = positions.unique_consecutive(return_inverse=True)
                logits = target_logits(pad_rows(hidden[unique]))
                yield LossChunk(rows, sequence.ids[positions], logits[index], of_rows)

        # Layers have made `normed`; when they are sharded, their parts are elsewhere by now.
        named = drafter.named_parameters()
        parameters = [p for name, p in named if p.requires_grad and not name.startswith("layers.")]
        score = partial(self.score, alone=normed.requires_grad)
        total, best = ChunkedDivergence.apply(score, chunks(), normed, *parameters)
        hit = drafter.target_ids[best] == sequence.ids[at + 1]
        seen = depth[chosen]
        count = partial(torch.bincount, minlength=int(depth.max()) + 1)
        return StepResult(total, count(seen[hit]), count(seen))

    def score(self, normed: Tensor, previous_ids: Tensor, *, alone: bool) -> list[Tensor]:
        """Draft logits (R, V) of hidden states (R, D). A head that is trained together with its
        correction is also compared without it (`alone`), so that it stays good by itself."""
        drafter = self.drafter
        if drafter.correction is None or not alone:
            return [method_of(drafter.config).logits(drafter, normed, previous_ids)]
        plain = drafter.logits(normed)
        return [drafter.correction.apply_to(plain, normed, drafter.embed(previous_ids)), plain]


class DocumentsAttend:
    """Attend of the target over packed documents, each causal and alone. Nothing sees the rows that
    fill a document's tiles, which come after it; rows after the last document are not attended."""

    def __init__(self, sequence: Sequence) -> None:
        _, number, counts = sequence.documents.unique_consecutive(
            return_inverse=True, return_counts=True
        )
        self.lengths = counts.tolist()
        self.parts = [(length, CausalAttend()) for length in self.lengths]
        # Where each row is in a table of documents, all as long as the longest.
        self.cells = number * max(self.lengths) + sequence.positions

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        if q.is_cuda and spec == AttentionSpec(spec.scale):
            return self.together(q, k, v, spec.scale)
        split = (x[: len(self.cells)].split(self.lengths) for x in (q, k, v))
        outputs = []
        for (length, attend), *part in zip(self.parts, *split, strict=True):
            outputs.append(attend(layer, *map(pad_rows, part), spec)[:length])
        return pad_rows(torch.cat(outputs))

    def together(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """All documents in one call, which saves a GPU many small ones."""
        table = len(self.lengths), max(self.lengths)

        def filled(x: Tensor) -> Tensor:  # (T, N, H) → (documents, N, longest, H)
            empty = x.new_zeros(table[0] * table[1], *x.shape[1:])
            rows = empty.index_copy(0, self.cells, x[: len(self.cells)])
            return rows.unflatten(0, table).transpose(1, 2)

        q, k, v = map(filled, (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        return pad_rows(out.transpose(1, 2).flatten(0, 1)[self.cells])


def logits_of(target: Target, ids: Tensor) -> Callable[[Tensor], Tensor]:
    """A function (R, E_target) → (R, V): the target's logits of the tokens `ids` (V,) only, by its
    own head with a copy of their rows of the output layer."""
    output = target.model.get_output_embeddings()
    rows = nn.Linear(output.weight.shape[1], len(ids), bias=False, device="meta")
    rows.weight = nn.Parameter(output.weight[ids], requires_grad=False)
    if output.bias is not None:
        rows.bias = nn.Parameter(output.bias[ids], requires_grad=False)
    [name] = [name for name, child in target.model.named_children() if child is output]
    head = copy(target.head)
    head._modules = head._modules | {name: rows}

    @torch.no_grad()
    def logits(hidden: Tensor) -> Tensor:
        found: Tensor = head(inputs_embeds=hidden[None], use_cache=False).logits
        return found[0]

    return logits


def run_target(target: Target, sequence: Sequence, taps: tuple[int, ...]) -> TargetOutput:
    """Hidden states (N, E) for labels and, of the layers `taps`, features (N, F·E) for the drafter,
    without gradient."""
    attend = DocumentsAttend(sequence)
    out = target.forward(pad_rows(sequence.ids), pad_rows(sequence.positions), attend, taps)
    return TargetOutput(*(rows[: len(sequence.ids)] for rows in out))


def supervised_elements(sequence: Sequence, elements: Elements) -> Tensor:
    """(E,) bool: the predicted token exists, is supervised, and is in the element's document."""
    predicted = elements.anchor + elements.depth + 2
    last = len(sequence.ids) - 1
    inside, predicted = predicted <= last, predicted.clamp(max=last)
    same = sequence.documents[predicted] == sequence.documents[elements.anchor]
    return inside & same & sequence.supervised[predicted]


def run_drafter(
    drafter: Drafter, sequence: Sequence, features: Tensor, elements: Elements
) -> Tensor:
    """Normed hidden states (E, D) of all elements."""
    features = features.to(drafter.norm.weight.dtype)
    autocast = torch.is_autocast_enabled("cpu")
    dtype = torch.get_autocast_dtype("cpu") if autocast else features.dtype
    given = TrainingPass(
        sequence.ids,
        sequence.positions,
        features,
        elements,
        partial(_attend, documents=sequence.documents, dtype=dtype),
        partial(visible, documents=sequence.documents),
    )
    return method_of(drafter.config).train_forward(drafter, given)


def _attend(elements: Elements, documents: Tensor, dtype: torch.dtype) -> Attend:
    if elements.anchor.is_cuda:
        return FlexAttend(block_mask(elements, documents), _compiled_flex())
    return BlockAttend(elements, documents, dtype)  # FlexAttention has no backward on the CPU


@cache
def _compiled_flex() -> Callable[..., Tensor]:
    return torch.compile(flex_attention, dynamic=True)


def compile_layers(drafter: Drafter) -> None:
    """Fuse what stands between the matrix products of a head whose layers run once a pass. Lengths
    are dynamic: layer 0 is compiled once and the others, being alike, once together, whatever the
    lengths."""
    first, *others = drafter.layers
    first = cast(FirstLayer, first)
    first.fuse = torch.compile(first.fuse, dynamic=True)  # type: ignore[method-assign]
    for layer in others:  # `forward`, not the module: hooks of FSDP and DDP stay outside
        layer.forward = torch.compile(layer.forward, dynamic=True)
