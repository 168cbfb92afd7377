"""One sequence: run the target, run the drafter on a segment's elements, compare.

Shapes: N tokens, E elements, D drafter hidden, F·E_target features.
"""

from collections.abc import Callable, Iterator
from functools import cache
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

from peagle.model.attention import Attend, AttentionSpec, CausalAttend
from peagle.model.drafter import Drafter, DrafterOutput
from peagle.model.layers import FirstLayer
from peagle.model.target import Target, TargetOutput
from peagle.train.cod import Elements
from peagle.train.loss import ChunkedDivergence, LossChunk, LossName
from peagle.train.mask import DenseAttend, FlexAttend, StepwiseAttend, block_mask, visible
from peagle.train.partition import Segment
from peagle.train.tiles import missing, whole_tiles

LOSS_ROWS = 512  # rows of logits alive at once


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
    """Sums over the elements trained; divide by `trained`."""

    loss: Tensor  # scalar, with gradient
    trained: int
    correct: Tensor  # (depths,) elements whose most likely token is the target's
    supervised: Tensor  # (depths,) elements


class Trainee(nn.Module):
    """Drafter and loss in one forward: what data parallelism wraps."""

    def __init__(
        self, drafter: Drafter, target: Target, loss: LossName, *, bf16: bool = True
    ) -> None:
        super().__init__()
        self.drafter, self.target, self.loss, self.bf16 = drafter, target, loss, bf16

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
        in the order of that position, so that the target's logits over the whole vocabulary exist
        once a position, and only for a chunk.
        """
        drafter, (anchor, depth) = self.drafter, segment.elements
        trained = segment.own & supervised_elements(sequence, segment.elements)
        chosen = trained.nonzero()[:, 0]
        at = (anchor + depth + 1)[chosen]
        order = at.argsort(stable=True)
        chosen, at, wanted = chosen[order], at[order], [at.new_empty(0)]

        def chunks() -> Iterator[LossChunk]:
            for rows, places in zip(chosen.split(LOSS_ROWS), at.split(LOSS_ROWS), strict=True):
                unique, index = places.unique_consecutive(return_inverse=True)
                full = self.target.logits(whole_tiles(hidden[unique]))[: len(unique)]
                wanted.append(full.max(-1).indices[index])
                yield LossChunk(rows, full[:, drafter.target_ids][index])

        scale = drafter.config.logit_scale
        total, best = ChunkedDivergence.apply(
            normed, drafter.lm_head.weight, scale, chunks(), self.loss
        )
        hit = drafter.target_ids[best] == torch.cat(wanted)
        seen, depths = depth[chosen], int(depth.max()) + 1
        correct = torch.bincount(seen[hit], minlength=depths)
        return StepResult(total, len(chosen), correct, torch.bincount(seen, minlength=depths))


class DocumentsAttend:
    """Attend of the target over packed documents, each causal and alone. Nothing sees the rows that
    fill a document's tiles, which come after it; rows after the last document are not attended."""

    def __init__(self, documents: Tensor) -> None:
        lengths = documents.unique_consecutive(return_counts=True)[1].tolist()
        self.parts = [(length, CausalAttend()) for length in lengths]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        lengths = [length for length, _ in self.parts]
        rows = sum(lengths)
        split = zip(*(x[:rows].split(lengths) for x in (q, k, v)), strict=True)
        outputs = []
        for (length, attend), part in zip(self.parts, split, strict=True):
            q, k, v = map(whole_tiles, part)
            outputs.append(attend(layer, q, k, v, spec)[:length])
        return whole_tiles(torch.cat(outputs))


def run_target(target: Target, sequence: Sequence, taps: tuple[int, ...]) -> TargetOutput:
    """Hidden states (N, E) for labels and, of the layers `taps`, features (N, F·E) for the drafter,
    without gradient."""
    count = len(sequence.ids)
    attend = DocumentsAttend(sequence.documents)
    out = target.forward(whole_tiles(sequence.ids), whole_tiles(sequence.positions), attend, taps)
    return TargetOutput(out.hidden[:count], out.features[:count])


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
    if drafter.config.method == "p-eagle":
        return _parallel(drafter, sequence, features, elements)
    return _autoregressive(drafter, sequence, features, elements)


def _attend(elements: Elements, documents: Tensor) -> Attend:
    if elements.anchor.is_cuda:
        return FlexAttend(block_mask(elements, documents), _compiled_flex())
    return DenseAttend(visible(elements, documents))


@cache
def _compiled_flex() -> Callable[..., Tensor]:
    return torch.compile(flex_attention, dynamic=True)


def compile_layers(drafter: Drafter) -> None:
    """Fuse what stands between the matrix products of P-EAGLE's layers. Lengths are dynamic: layer
    0 is compiled once and the others, being alike, once together, whatever the lengths."""
    first, *others = drafter.layers
    first = cast(FirstLayer, first)
    first.fuse = torch.compile(first.fuse, dynamic=True)  # type: ignore[method-assign]
    for layer in others:  # `forward`, not the module: hooks of FSDP and DDP stay outside
        layer.forward = torch.compile(layer.forward, dynamic=True)


def _parallel(drafter: Drafter, sequence: Sequence, features: Tensor, elements: Elements) -> Tensor:
    """All elements in one forward: real inputs at depth 0, placeholders behind it."""
    assert drafter.config.mask_token_id is not None
    count, (anchor, depth) = len(elements.anchor), _padded(elements)
    real = anchor[depth == 0]
    projected = drafter.project(whole_tiles(features[real]))[: len(real)]
    placeholders = drafter.placeholders(depth[len(real) :])
    mask_ids = torch.full_like(anchor[len(real) :], drafter.config.mask_token_id)
    ids = torch.cat([sequence.ids[real + 1], mask_ids])
    attend = _attend(Elements(anchor, depth), sequence.documents)
    positions = sequence.positions[anchor] + depth
    out: DrafterOutput = drafter(ids, torch.cat([projected, placeholders]), positions, attend)
    return out.normed[:count]


def _padded(elements: Elements) -> Elements:
    """In whole tiles: what fills the last is behind every depth, so only the padding sees it."""
    more = missing(len(elements.anchor))
    anchor = torch.cat([elements.anchor, elements.anchor[:1].expand(more)])
    behind = (elements.depth[-1:] + 1).expand(more)
    return Elements(anchor, torch.cat([elements.depth, behind]))


def _autoregressive(
    drafter: Drafter, sequence: Sequence, features: Tensor, elements: Elements
) -> Tensor:
    """EAGLE-3's training-time test: depth by depth, each fed the hidden state before it. The last
    tile of a depth is filled with copies of its first element, which nobody sees."""
    groups = [elements.at(depth) for depth in range(int(elements.depth.max()) + 1)]
    filled = [torch.cat([group, group[:1].expand(missing(len(group)))]) for group in groups]
    copies = [torch.arange(len(f)) >= len(g) for f, g in zip(filled, groups, strict=True)]
    every, copy = torch.cat(filled), torch.cat(copies).to(features.device)
    mask = visible(elements, sequence.documents)[every][:, every].masked_fill_(copy, False)
    attend, outputs = StepwiseAttend(mask), list[Tensor]()
    anchors = [elements.anchor[rows] for rows in filled]
    feature = drafter.project(features[anchors[0]])
    for depth, (anchor, group) in enumerate(zip(anchors, groups, strict=True)):
        positions = sequence.positions[anchor] + depth
        out = drafter(sequence.ids[anchor + 1 + depth], feature, positions, attend)
        outputs.append(out.normed[: len(group)])
        if depth + 1 < len(groups):
            parents = torch.searchsorted(elements.anchor[group], anchors[depth + 1])
            feature = out.recurrent[parents]
    return torch.cat(outputs)
