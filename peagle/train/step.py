"""One sequence: run the target, run the drafter on its elements, compare.

Shapes: N tokens, E elements, R supervised target rows, V draft vocabulary, D drafter hidden.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from peagle.model.attend import Attend, CausalAttend
from peagle.model.drafter import Drafter
from peagle.model.target import Target
from peagle.train.cod import Elements
from peagle.train.loss import LossName, divergence
from peagle.train.mask import DenseAttend, FlexAttend, block_mask, visible

ROW_TILE = 64  # rows of a forward are padded to a multiple of this
LOSS_ROWS = 1024  # rows of draft-vocabulary logits alive at once


class Sequence(NamedTuple):
    """A packed sequence; all (N,)."""

    ids: Tensor
    supervised: Tensor
    documents: Tensor


class Labels(NamedTuple):
    """What the target says at the positions before supervised tokens."""

    row: Tensor  # (N,) index into the next two for each position, −1 where none is needed
    logits: Tensor  # (R, V) target logits of the draft vocabulary
    best: Tensor  # (R,) most likely target token of the whole vocabulary


@dataclass(slots=True)
class StepResult:
    """Sums over supervised elements; divide by `count`."""

    loss: Tensor  # scalar, with gradient
    count: int
    correct: Tensor  # (depths,) elements whose most likely token is the target's
    supervised: Tensor  # (depths,) elements


def run_target(target: Target, drafter: Drafter, sequence: Sequence) -> tuple[Tensor, Labels]:
    """Features (N, F·E) and labels of one document, without gradient."""
    positions = torch.arange(len(sequence.ids), device=sequence.ids.device)
    out = target.forward(sequence.ids, positions, CausalAttend())
    assert out.features is not None, "tap the drafter's feature layers first"
    same = sequence.documents[1:] == sequence.documents[:-1]
    wanted = (sequence.supervised[1:] & same).nonzero()[:, 0]  # position i predicts token i+1
    row = torch.full_like(sequence.ids, -1)
    row[wanted] = torch.arange(len(wanted), device=row.device)
    logits, best = [], []
    for rows in wanted.split(256):  # the whole vocabulary only a few rows at a time
        full = target.logits(out.hidden[rows])
        logits.append(full[:, drafter.target_ids])
        best.append(full.argmax(-1))
    return out.features, Labels(row, torch.cat(logits), torch.cat(best))


def run_drafter(
    drafter: Drafter, sequence: Sequence, features: Tensor, elements: Elements
) -> Tensor:
    """Normed hidden states (E, D) of all elements."""
    features = features.to(drafter.norm.weight.dtype)
    if drafter.config.method == "p-eagle":
        return _parallel(drafter, sequence, features, elements)
    return _autoregressive(drafter, sequence, features, elements)


def compare(
    drafter: Drafter, elements: Elements, normed: Tensor, labels: Labels, loss: LossName
) -> StepResult:
    """Loss and accuracy of every supervised element."""
    position = elements.anchor + elements.depth + 1
    last = len(labels.row) - 1
    rows = torch.where(position <= last, labels.row[position.clamp(max=last)], -1)
    chosen = (rows >= 0).nonzero()[:, 0]
    depths = int(elements.depth.max()) + 1
    total, hits = normed.new_zeros((), dtype=torch.float32), []
    for part in chosen.split(LOSS_ROWS):
        logits = drafter.logits(normed[part])
        total = total + divergence(logits, labels.logits[rows[part]], loss).sum()
        hits.append(drafter.target_ids[logits.detach().argmax(-1)] == labels.best[rows[part]])
    depth = elements.depth[chosen]
    hit = torch.cat(hits)
    correct = torch.bincount(depth[hit], minlength=depths)
    return StepResult(total, len(chosen), correct, torch.bincount(depth, minlength=depths))


def _attend(elements: Elements, documents: Tensor) -> Attend:
    if elements.anchor.is_cuda:
        return FlexAttend(block_mask(elements, documents), _compiled_flex())
    return DenseAttend(visible(elements, elements, documents))


@cache
def _compiled_flex() -> Callable[..., Tensor]:
    return torch.compile(flex_attention, dynamic=True)


def _parallel(drafter: Drafter, sequence: Sequence, features: Tensor, elements: Elements) -> Tensor:
    """All elements in one forward: real inputs at depth 0, placeholders behind it."""
    assert drafter.config.mask_token_id is not None
    count, (anchor, depth) = len(elements.anchor), _padded(elements)
    real = anchor[depth == 0]
    projected = drafter.project(features[real])
    placeholders = drafter.placeholder().expand(len(anchor) - len(real), -1)
    mask_ids = torch.full_like(anchor[len(real) :], drafter.config.mask_token_id)
    ids = torch.cat([sequence.ids[real + 1], mask_ids])
    attend = _attend(Elements(anchor, depth), sequence.documents)
    return drafter(ids, torch.cat([projected, placeholders]), anchor + depth, attend).normed[:count]


def _padded(elements: Elements) -> Elements:
    """Up to a multiple of ROW_TILE elements, behind every depth: only the padding sees them.
    Kernels are made anew for every number of rows, and kept: lengths that recur save both."""
    missing = -len(elements.anchor) % ROW_TILE
    anchor = torch.cat([elements.anchor, elements.anchor[:1].expand(missing)])
    behind = (elements.depth[-1:] + 1).expand(missing)
    return Elements(anchor, torch.cat([elements.depth, behind]))


def _autoregressive(
    drafter: Drafter, sequence: Sequence, features: Tensor, elements: Elements
) -> Tensor:
    """EAGLE-3's training-time test: depth by depth, each fed the hidden state before it."""
    attend = DenseAttend(visible(elements, elements, sequence.documents))
    anchor = elements.anchor[elements.at(0)]
    feature, outputs = drafter.project(features[anchor]), list[Tensor]()
    for depth in range(int(elements.depth.max()) + 1):
        out = drafter(sequence.ids[anchor + 1 + depth], feature, anchor + depth, attend)
        outputs.append(out.normed)
        children = elements.anchor[elements.at(depth + 1)]
        feature = out.recurrent[torch.searchsorted(anchor, children)]
        anchor = children
    return torch.cat(outputs)
