"""Contents of the caches, and slots that no row may see."""

import pytest
import torch

from peagle.backends.batch import BLOCK
from peagle.backends.kv_cache import FeatureCache, KVCache, zeros
from peagle.model.attention import HeadShape

CPU = torch.device("cpu")
SHAPES = [HeadShape(2, 8, 8), HeadShape(1, 16, 4)]


def test_layers_may_differ_in_shape() -> None:
    cache = KVCache(2, SHAPES, torch.float32, CPU)
    slots = torch.tensor([16, 17, 3])
    for layer, (heads, size, wide) in enumerate(SHAPES):
        k, v = torch.randn(3, heads, size), torch.randn(3, heads, wide)
        keys, values = cache.write(layer, slots, k, v)
        assert keys.shape == (3, BLOCK, heads, size) and values.shape == (3, BLOCK, heads, wide)
        assert torch.equal(keys[1, :2], k[:2]) and torch.equal(values[1, :2], v[:2])
        assert torch.equal(keys[0, 3], k[2]) and torch.equal(values[0, 3], v[2])
        assert keys.count_nonzero() == k.numel() and values.count_nonzero() == v.numel()


def test_the_last_block_is_for_padding() -> None:
    cache = KVCache(5, SHAPES, torch.float32, CPU)
    assert cache.padding == 5
    assert all(len(tensor) == 6 for layer in cache.layers for tensor in layer)


def test_moving_copies_all_at_once() -> None:
    """A slot that is written may be one that is read."""
    cache, features = KVCache(2, SHAPES, torch.float32, CPU), FeatureCache(2, 6, torch.float32, CPU)
    kept = [part for layer in cache.layers for part in layer]
    features.write(torch.arange(32), torch.randn(32, 6))
    for part in kept:
        part.normal_()
    before = [part.flatten(0, 1).clone() for part in kept]
    read = features.read(torch.arange(32))
    cache.move([4, 19, 7], [3, 4, 16])
    features.move([4, 19, 7], [3, 4, 16])
    order = list(range(32))
    order[3], order[4], order[16] = 4, 19, 7
    for part, old in zip(kept, before, strict=True):
        assert torch.equal(part.flatten(0, 1)[:32], old[order])
    assert torch.equal(features.read(torch.arange(32)), read[order])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_features_are_found_where_they_were_kept(dtype: torch.dtype) -> None:
    cache = FeatureCache(3, 6, dtype, CPU)
    one, two = torch.randn(4, 6).to(dtype), torch.randn(2, 6).to(dtype)
    cache.write(torch.tensor([33, 2, 3, 47]), one)
    cache.write(torch.tensor([2, 16]), two)
    found = cache.read(torch.tensor([47, 2, 33, 16, 0]))
    assert torch.equal(found, torch.stack([one[3], two[0], one[0], two[1], 0 * one[0]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_zeros(dtype: torch.dtype) -> None:
    made = zeros((3, 4), dtype, CPU)
    assert made.dtype == dtype and made.shape == (3, 4) and not made.any()
