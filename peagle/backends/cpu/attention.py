"""Attention over blocks of keys and values, by native code, for any model that takes an `Attend`.

Shapes: T rows, N query heads, M key/value heads, H and HV head sizes of keys and of values.
"""

import ctypes

import torch
from torch import Tensor

from peagle.backends.batch import Batch
from peagle.backends.cpu.library import COUNT, POINTER, load
from peagle.backends.kv_cache import KVCache
from peagle.model.attention import AttentionSpec

FLOAT = ctypes.c_float


class _Batch(ctypes.Structure):
    """Mirrors native/attend.h."""

    _fields_ = [("rows", COUNT), ("requests", COUNT), ("table", COUNT), ("slot_mapping", POINTER)]
    _fields_ += [("block_tables", POINTER), ("query_lens", POINTER), ("seq_lens", POINTER)]
    _fields_ += [("tails", POINTER), ("longest", COUNT)]


class _Kept(ctypes.Structure):
    """Mirrors native/attention.h."""

    _fields_ = [("keys", POINTER), ("values", POINTER), ("heads", COUNT)]
    _fields_ += [("key_width", COUNT), ("value_width", COUNT)]


class _Spec(ctypes.Structure):
    """Mirrors native/attention.h: 0, or no pointer, where a layer has none."""

    _fields_ = [("scale", FLOAT), ("softcap", FLOAT), ("window", COUNT), ("sinks", POINTER)]


class NativeBatch:
    """A batch as the library reads it."""

    def __init__(self, batch: Batch) -> None:
        parts = [batch.slot_mapping, batch.block_tables, batch.query_lens, batch.seq_lens]
        longest = 0
        if batch.tails is not None:
            parts.append(batch.tails)
            longest = batch.tails.shape[1]
        self._alive = [part.contiguous() for part in parts]
        pointers = [part.data_ptr() for part in self._alive]
        self.struct = _Batch(len(batch), *batch.block_tables.shape, *pointers)
        self.struct.longest = longest


class CpuAttend:
    """An `Attend` for one batch over a cache. No row depends on the rows beside it."""

    def __init__(self, batch: Batch, cache: KVCache) -> None:
        self.slot_mapping, self.cache = batch.slot_mapping, cache
        self.batch = NativeBatch(batch)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        keys, values = self.cache.write(layer, self.slot_mapping, k, v)
        q = q.contiguous()
        out = q.new_empty(*q.shape[:2], values.shape[-1])
        sinks = None if spec.sinks is None else spec.sinks.float().contiguous()
        given = _Spec(spec.scale, spec.softcap or 0.0, spec.window or 0)
        if sinks is not None:
            given.sinks = sinks.data_ptr()
        kept = _Kept(keys.data_ptr(), values.data_ptr(), *keys.shape[2:], values.shape[-1])
        load().function("attend", q.dtype)(
            q.data_ptr(),
            ctypes.byref(kept),
            out.data_ptr(),
            q.shape[1],
            ctypes.byref(self.batch.struct),
            ctypes.byref(given),
            torch.get_num_threads(),
        )
        return out
