"""The training of each sequence: its elements, drawn by (seed, number) alone, and its passes."""

from typing import NamedTuple, cast

import torch
from accelerate.utils import send_to_device

from peagle.model.device import free_memory
from peagle.model.drafter import Drafter
from peagle.train.batches import Batches, PackedDocuments
from peagle.train.cod import sample_elements
from peagle.train.config import TrainConfig
from peagle.train.memory import SHARE, choose_segments, pass_cost
from peagle.train.partition import Segment, one_pass, partition


class TrainingSequence(NamedTuple):
    """One sequence, and the passes that train it."""

    sequence: PackedDocuments  # supervised: tokens of the draft vocabulary only
    segments: list[Segment]
    chains: int  # trained elements at depth 0, one for each chain
    answer_tokens: int  # supervised tokens of all vocabulary


class Sampler:
    """Draws elements for `drafter`, and partitions them by the free memory of its device."""

    def __init__(self, config: TrainConfig, batches: Batches, drafter: Drafter) -> None:
        assert drafter.config.depths is not None
        self.config = config
        self.batches = batches
        self.depths = drafter.config.depths
        self.device = drafter.norm.weight.device
        self.vocabulary = drafter.target_ids.cpu()
        self.cost = pass_cost(drafter)

    def sample(self, number: int) -> TrainingSequence:
        """Sequence `number`, counted from the start of training, on the device."""
        config = self.config
        sequence = self.batches.sequence(number)
        answer_tokens = int(sequence.supervised.sum())
        # A token outside the draft vocabulary ends every draft, so elements after it never count.
        known = torch.isin(sequence.ids, self.vocabulary)
        sequence = sequence._replace(supervised=sequence.supervised & known)
        generator = torch.Generator().manual_seed((config.seed + 1) * 1_000_003 + number)
        elements = sample_elements(*sequence[1:], self.depths, config.ratio, generator)
        whole = one_pass(sequence, elements)
        count = config.segments or self._fewest_segments(whole, sequence)
        segments = partition(whole, sequence.documents, count)
        chains = int((elements.depth[whole.trained] == 0).sum())
        made = TrainingSequence(sequence, segments, chains, answer_tokens)
        return cast(TrainingSequence, send_to_device(made, self.device))

    def _fewest_segments(self, whole: Segment, sequence: PackedDocuments) -> int:
        room = SHARE * free_memory(self.device)
        dense = self.device.type == "cpu"
        return choose_segments(whole.elements, sequence.documents, self.cost, room, dense=dense)
