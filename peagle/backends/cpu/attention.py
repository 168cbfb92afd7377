"""Attention over blocks of keys and values, by native code, for any model that takes an `Attend`.

Shapes: T rows, N query heads, M key/value heads, H and HV head sizes of keys and of values.
"""

import ctypes
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from peagle.backends.cpu import structs
from peagle.backends.cpu.library import load
from peagle.model.attention import AttentionSpec

if TYPE_CHECKING:
    from peagle.backends.batch import Batch
    from peagle.backends.kv_cache import KVCache


def native_batch(batch: "Batch") -> structs.Batch:
    """A batch as the library reads it."""
    tails = [] if batch.tails is None else [batch.tails]
    parts = [batch.slot_mapping, batch.block_tables, batch.query_lens, batch.seq_lens, *tails]
    parts = [part.contiguous() for part in parts]
    pointers = [part.data_ptr() for part in parts]
    longest = tails[0].shape[1] if tails else 0
    made = structs.Batch(len(batch), *batch.block_tables.shape, *pointers, longest=longest)
    made.alive = parts
    return made


class CpuAttend:
    """An `Attend` for one batch over a cache. No row depends on the rows beside it."""

    def __init__(self, batch: "Batch", cache: "KVCache") -> None:
        self.slot_mapping = batch.slot_mapping
        self.cache = cache
        self.batch = native_batch(batch)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        keys, values = self.cache.write(layer, self.slot_mapping, k, v)
        q = q.contiguous()
        out = q.new_empty(*q.shape[:2], values.shape[-1])
        sinks = None if spec.sinks is None else spec.sinks.float().contiguous()
        pointer = None if sinks is None else sinks.data_ptr()
        given = structs.Spec(spec.scale, spec.softcap or 0.0, spec.window or 0, pointer)
        kept = structs.Kept(keys.data_ptr(), values.data_ptr(), *keys.shape[2:], values.shape[-1])
        attend = load().function("attend", q.dtype)
        inputs = (q.data_ptr(), ctypes.byref(kept), out.data_ptr(), q.shape[1])
        attend(*inputs, ctypes.byref(self.batch), ctypes.byref(given), torch.get_num_threads())
        return out
