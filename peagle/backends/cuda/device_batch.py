"""A batch's numbers on the GPU, brought over in one copy.

Shapes: T rows, B requests, P blocks of all requests together, L slots of the longest tail.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from peagle.backends.batch import BLOCK, Batch


class DeviceBatch:
    """Views of one int64 tensor with room for some rows and requests.

    Requests after the last have no rows. Rows after the last belong to no request.
    """

    def __init__(self, numbers: Tensor, rows: int, requests: int, *, trees: bool) -> None:
        """`numbers` must hold what `pack` returns for as many rows and requests. `trees`: rows may
        have tails."""
        sizes = [rows, rows, rows, requests + 1, requests, requests, 1]
        parts = numbers.split([*sizes, len(numbers) - sum(sizes)])
        self.numbers = numbers
        self.rows = rows
        self.requests = requests
        self.trees = trees
        self.ids = parts[0]  # (T,)
        self.positions = parts[1]  # (T,)
        self.slots = parts[2]  # (T,)
        self.query_starts = parts[3]  # (B + 1,) first row of each request, then the end
        self.seq_lens = parts[4]  # (B,)
        self.first_blocks = parts[5]  # (B,) where each request's blocks begin in `tables`
        self.longest_tail = parts[6]  # (1,) L, 0 without trees
        self.tables = parts[7]  # (T · L + P,) tails of rows, then blocks of requests

    @classmethod
    def of(cls, batch: Batch, padding: int, device: torch.device) -> "DeviceBatch":
        """A batch on `device`, with no room to spare."""
        rows = len(batch)
        requests = len(batch.query_lens)
        packed = pack(batch, rows, requests, padding)
        numbers = torch.empty_like(packed, device=device)
        made = cls(numbers, rows, requests, trees=batch.tails is not None)
        made.fill(packed, batch)
        return made

    def fill(self, packed: Tensor, batch: Batch) -> None:
        """Write the numbers of a batch, packed for these rows and requests."""
        if self.numbers.is_cuda:
            packed = packed.pin_memory()  # a copy from other memory waits for the GPU
        self.numbers[: len(packed)].copy_(packed, non_blocking=True)
        if not batch.ids.is_cpu:
            self.ids[: len(batch)].copy_(batch.ids)


def pack(batch: Batch, rows: int, requests: int, padding: int) -> Tensor:
    """The numbers of a batch in one int64 tensor on the CPU, with room for `rows` and `requests`.

    Rows of padding are kept in block `padding`. Ids that are on the GPU already are left at 0.
    """
    ids = batch.ids
    if not ids.is_cpu:
        ids = torch.zeros_like(batch.positions)
    counts = -(-batch.seq_lens // BLOCK)
    used = torch.arange(batch.block_tables.shape[1]) < counts[:, None]
    tails = batch.tails
    if tails is None:
        tails = batch.positions.new_empty(len(batch), 0)
    query_starts = F.pad(batch.query_lens.cumsum(0), (1, 0))
    parts = [
        _extended(ids, rows, 0),
        _extended(batch.positions, rows, 0),
        _extended(batch.slot_mapping, rows, padding * BLOCK),
        _extended(query_starts, requests + 1, len(batch)),
        _extended(batch.seq_lens, requests, 0),
        _extended(tails.numel() + counts.cumsum(0) - counts, requests, 0),
        torch.tensor([tails.shape[1]]),
        tails.flatten(),
        batch.block_tables[used],
    ]
    return torch.cat(parts)


def _extended(numbers: Tensor, length: int, filler: int) -> Tensor:
    return F.pad(numbers, (0, length - len(numbers)), value=filler)
