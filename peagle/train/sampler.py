"""The training of each sequence: its elements, drawn by (seed, number) alone, and as many passes as
the memory of one of them asks for.

Shapes: E elements.
"""

from functools import cached_property
from typing import NamedTuple, cast

import torch
from accelerate.utils import send_to_device
from torch import Tensor

from peagle.methods.base import Elements
from peagle.methods.keys import default_k
from peagle.model.drafter import Drafter
from peagle.model.tensors import free_memory
from peagle.train.batches import Batches, PackedDocuments
from peagle.train.config import TrainConfig
from peagle.train.elements import Segment, partition, sample_elements
from peagle.train.passes import multiplies_bf16, run_drafter

PROBE = (64, 192)  # tokens of the two sequences a pass is measured on
SHARE = 0.35  # of the free memory that activations may take; gaps between them take as much again
MAX_SEGMENTS = 64  # segments


class PassCost(NamedTuple):
    """Bytes that a pass keeps for backward."""

    fixed: float
    element: float  # added by each

    def of(self, elements: int) -> float:
        """Bytes of a pass over some elements."""
        return self.fixed + self.element * elements


def pass_cost(drafter: Drafter, *, bf16: bool = True) -> PassCost:
    """Measured on two short passes over random features, so that it holds for every drafter."""
    few, many = (_kept_for_backward(drafter, tokens, bf16=bf16) for tokens in PROBE)
    each = (many - few) / (PROBE[1] - PROBE[0])
    return PassCost(few - each * (PROBE[0] - 1), each)


def _kept_for_backward(drafter: Drafter, tokens: int, *, bf16: bool) -> int:
    device = drafter.norm.weight.device
    ids = torch.zeros(tokens, dtype=torch.int64, device=device)
    features = torch.zeros(tokens, drafter.config.feature_width, device=device)
    anchors = torch.arange(tokens - 1, device=device)
    kept: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    elements = Elements(anchors, torch.zeros_like(anchors))
    with (
        torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor),
        torch.autocast(device.type, torch.bfloat16, enabled=bf16),
    ):
        run_drafter(drafter, PackedDocuments(ids, ids > 0, ids), features, elements)
    weights = {p.untyped_storage().data_ptr() for p in drafter.parameters()}
    return sum(size for pointer, size in kept.items() if pointer not in weights)


def choose_segments(whole: Segment, documents: Tensor, cost: PassCost, room: float) -> int:
    """Fewest segments whose largest pass fits into `room` bytes; MAX_SEGMENTS when none does."""
    tried = range(1, MAX_SEGMENTS)
    fit = (n for n in tried if cost.of(largest_pass(whole, documents, n)) <= room)
    return next(fit, MAX_SEGMENTS)


def largest_pass(whole: Segment, documents: Tensor, segments: int) -> int:
    """Elements of the largest segment."""
    parts = partition(whole, documents, segments)
    return max((len(part.trained) for part in parts), default=0)


class TrainingSequence(NamedTuple):
    """One sequence, and the passes that train it."""

    sequence: PackedDocuments  # supervised: tokens of the draft vocabulary only
    segments: list[Segment]
    chains: int  # trained elements at depth 0, one for each chain
    answer_tokens: int  # supervised tokens of all vocabulary


class Sampler:
    """Draws elements for `drafter`, and partitions them by the free memory of its device."""

    def __init__(self, config: TrainConfig, batches: Batches, drafter: Drafter) -> None:
        self.config = config
        self.batches = batches
        self.drafter = drafter
        self.depths = default_k(drafter.config)
        self.device = drafter.norm.weight.device
        self.cost = pass_cost(drafter, bf16=multiplies_bf16(self.device))

    @cached_property
    def vocabulary(self) -> Tensor:
        """Target ids (V,) that the head can draft. First read when training begins: a run that goes
        on has those of its checkpoint."""
        return self.drafter.target_ids.cpu()

    def sample(self, number: int) -> TrainingSequence:
        """Sequence `number`, counted from the start of training, on the device."""
        sequence = self.batches.sequence(number)
        answer_tokens = int(sequence.supervised.sum())
        # A token outside the draft vocabulary ends every draft, so elements after it never count.
        known = torch.isin(sequence.ids, self.vocabulary)
        sequence = sequence._replace(supervised=sequence.supervised & known)
        generator = torch.Generator().manual_seed((self.config.seed + 1) * 1_000_003 + number)
        whole = sample_elements(*sequence[1:], self.depths, self.config.ratio, generator)
        documents = sequence.documents
        room = SHARE * free_memory(self.device)
        count = self.config.segments or choose_segments(whole, documents, self.cost, room)
        segments = partition(whole, documents, count)
        chains = int((whole.elements.depth[whole.trained] == 0).sum())
        made = TrainingSequence(sequence, segments, chains, answer_tokens)
        return cast(TrainingSequence, send_to_device(made, self.device))
