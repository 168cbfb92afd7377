"""How much memory a pass needs, and so into how many a sequence is partitioned.

Shapes: E elements.
"""

import os

import torch
from torch import Tensor

from peagle.model.target import Target
from peagle.train.cod import Elements
from peagle.train.partition import Segment, partition
from peagle.train.step import Sequence, Trainee, run_target

PROBE = (64, 192)  # tokens of the two sequences a pass is measured on
SHARE = 0.5  # of the free memory that activations may take
MASK_BYTES = 5  # an entry of the dense mask, and what the attention kernel turns it into
MOST = 64  # segments


def activation_bytes(trainee: Trainee, target: Target) -> tuple[float, float]:
    """(bytes a pass keeps for backward whatever its length, bytes an element adds), without the
    mask: measured, so that it holds for every drafter, dtype and loss."""
    few, many = (_kept_for_backward(trainee, target, tokens) for tokens in PROBE)
    each = (many - few) / (PROBE[1] - PROBE[0])
    return few - each * (PROBE[0] - 1), each


def _kept_for_backward(trainee: Trainee, target: Target, tokens: int) -> int:
    ids = torch.zeros(tokens, dtype=torch.int64, device=target.device)
    sequence = Sequence(ids, torch.zeros_like(ids, dtype=torch.bool), torch.zeros_like(ids))
    anchors = torch.arange(tokens - 1, device=target.device)
    kept: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    own = torch.ones_like(anchors, dtype=torch.bool)
    segment = Segment(Elements(anchors, torch.zeros_like(anchors)), own)
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        said, before = run_target(target, sequence), set(kept)
        trainee(sequence, said, segment)
    fixed = {p.untyped_storage().data_ptr() for p in trainee.parameters()} | before
    return sum(size for pointer, size in kept.items() if pointer not in fixed)


def free_memory(device: torch.device) -> int:
    """Bytes that can still be allocated."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def choose_segments(
    elements: Elements, documents: Tensor, cost: tuple[float, float], room: float
) -> int:
    """Fewest segments whose largest pass fits into `room` bytes; MOST when none does."""
    fixed, each = cost
    dense = 0 if documents.is_cuda else MASK_BYTES
    for segments in range(1, MOST):
        largest = max(len(part.own) for part in partition(elements, documents, segments))
        if fixed + each * largest + dense * largest**2 <= room:
            return segments
    return MOST
