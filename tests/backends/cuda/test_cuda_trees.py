"""Rows of draft trees on the cuda backend: by each row's definition, bit by bit those of plain
decoding, and the target's own tokens in the engine."""

import random
from typing import Any

import pytest
import torch
from packed import Keys, Rows, by_definition, chain, random_keys, tree
from tiny import make_drafter, random_prompts
from torch import Tensor

from peagle.backends.batch import Batch, Span, blocks_of, slots_of
from peagle.backends.kv_cache import KVCache
from peagle.backends.tiles import tiles_of
from peagle.engine.llm import LLM
from peagle.engine.params import SamplingParams
from peagle.model.attention import AttentionSpec, HeadShape

graphs = pytest.importorskip("peagle.backends.cuda.graphs", reason="no Triton")

from recorders import DEVICE, CountingRecorder, target_on_device  # noqa: E402 (needs Triton)

from peagle.backends.cuda import attention  # noqa: E402 (needs Triton)
from peagle.backends.cuda.backend import CudaBackend  # noqa: E402 (needs Triton)
from peagle.backends.cuda.device_batch import DeviceBatch  # noqa: E402 (needs Triton)

HEADS, POOL = 6, 60
SHAPES = {  # by keys of a step; the width of a head decides them
    64: HeadShape(2, 64, 64),
    16: HeadShape(1, 24, 256),
}
ROOTS = {  # positions, about the ends of steps, and nodes below
    64: [(62, 9), (63, 40), (64, 5), (0, 3)],
    16: [(14, 25), (15, 40), (16, 9), (33, 3)],
}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "a window": {"window": 9},
    "a window of one": {"window": 1},
    "a cap": {"softcap": 1.5},
    "sinks in a long window": {"window": 40, "sinks": torch.linspace(-2, 3, HEADS)},
}
CASES = [(64, kind) for kind in ("plain", "sinks in a long window")]
CASES += [(16, kind) for kind in ("a window", "a window of one", "a cap")]


def parents(nodes: int, seed: int) -> list[int]:
    """The first half are a chain, so that it reaches further steps."""
    draw = random.Random(seed)
    return [node if node < nodes // 2 else draw.randrange(node + 1) for node in range(nodes)]


def requests(step: int) -> list[Rows]:
    """Trees, a prompt of two tiles and a single token beside them, on blocks anywhere."""
    free = random.Random(0).sample(range(POOL), POOL)

    def blocks(tokens: int) -> list[int]:
        return [free.pop() for _ in range(blocks_of(tokens))]

    found = []
    for seed, (root, nodes) in enumerate(ROOTS[step]):
        found.append(tree(blocks(root + 1 + nodes), root, parents(nodes, seed)))
    prompt, single = chain(blocks(20), 3, 17), chain(blocks(71), 70, 1)
    return [*found[:2], prompt, single, *found[2:]]


def spec_of(kind: str, shape: HeadShape) -> AttentionSpec:
    more = dict(KINDS[kind])
    if "sinks" in more:
        more["sinks"] = more["sinks"].to(DEVICE)
    return AttentionSpec(shape.key_size**-0.5, **more)


def filled_cache(shape: HeadShape, rows: list[Rows], keys: Keys) -> KVCache:
    """Keys and values of earlier rows; numbers that no row may see elsewhere."""
    cache = KVCache(POOL, [shape], torch.float32, DEVICE)
    for part in cache.layers[0]:
        part.fill_(1e4)
    for one, (k, v) in zip(rows, keys.past, strict=True):
        slots = torch.tensor(slots_of(one.span.blocks, 0, len(k)), dtype=torch.int64)
        cache.write(0, slots.to(DEVICE), k.to(DEVICE), v.to(DEVICE))
    return cache


def run(batch: Batch, cache: KVCache, qkv: list[Tensor], spec: AttentionSpec) -> Tensor:
    """By the kernel of the batch-invariant mode."""
    on_device = DeviceBatch.of(batch, cache.padding, DEVICE)
    attend = attention.CudaAttend(on_device, cache, int(batch.positions.max()) + 1, exact=True)
    return attend(0, *(x.to(DEVICE) for x in qkv), spec)


@pytest.mark.parametrize(("step", "kind"), CASES)
def test_rows_are_by_definition(step: int, kind: str) -> None:
    """With keys in one part and in several, in tiles of 8 tokens and of more."""
    shape, rows = SHAPES[step], requests(step)
    keys, spec = random_keys(rows, HEADS, shape, 0), spec_of(kind, shape)
    cache = filled_cache(shape, rows, keys)
    batch = Batch.of([one.span for one in rows])
    on_device = DeviceBatch.of(batch, cache.padding, DEVICE)
    q, k, v = (x.to(DEVICE) for x in (keys.q, keys.k, keys.v))
    kept = cache.write(0, on_device.slots, k, v)
    assert attention._step(*kept) == step
    wanted = by_definition(rows, keys, AttentionSpec(spec.scale, **KINDS[kind]))
    for tokens, splits in ((8, 1), (16, 4)):
        launch = attention.Launch(attention.program_rows(tokens, q, *kept), splits, trees=True)
        found = attention.paged_attention(q, *kept, on_device, spec, launch)
        torch.testing.assert_close(found.cpu(), wanted, atol=2e-6, rtol=1e-5)


@pytest.mark.usefixtures("plain_products")
@pytest.mark.parametrize(("step", "kind"), CASES)
def test_rows_have_the_bits_of_plain_decoding(step: int, kind: str) -> None:
    """A row's ancestors and itself in order, in a cache of their own."""
    shape, rows = SHAPES[step], requests(step)
    keys, spec = random_keys(rows, HEADS, shape, 0), spec_of(kind, shape)
    cache, other = filled_cache(shape, rows, keys), filled_cache(shape, [], keys._replace(past=[]))
    batch = Batch.of([one.span for one in rows])
    found = run(batch, cache, [keys.q, keys.k, keys.v], spec)
    first, compared = 0, 0
    for one, past in zip(rows, keys.past, strict=True):
        own = slice(first, first + len(one.visible))
        first = own.stop
        k, v = (torch.cat(parts) for parts in zip(past, (keys.k[own], keys.v[own]), strict=True))
        for row in range(len(one.visible) - 1, -1, -4):
            seen = [at + (what == "row") * one.span.start for what, at in one.visible[row]]
            blocks = range(blocks_of(len(seen)))
            slots = torch.tensor(slots_of(blocks, 0, len(seen))).to(DEVICE)
            other.write(0, slots, k[seen].to(DEVICE), v[seen].to(DEVICE))
            last = Batch.of([Span(blocks, len(seen) - 1, [0])])
            qkv = [keys.q[own][row : row + 1], k[seen[-1:]], v[seen[-1:]]]
            assert torch.equal(found[own][row], run(last, other, qkv, spec)[0])
            compared += 1
    assert compared > 15


@pytest.mark.usefixtures("plain_products")
def test_a_part_of_a_tree_has_the_bits_of_the_whole() -> None:
    """The batch-invariant mode cuts trees."""
    shape, rows = SHAPES[16], requests(16)[:3]
    keys, spec = random_keys(rows, HEADS, shape, 0), spec_of("a window", shape)
    cache = filled_cache(shape, rows, keys)
    batch = Batch.of([one.span for one in rows])
    qkv = [keys.q, keys.k, keys.v]
    whole = run(batch, cache, qkv, spec)
    for number, part in enumerate(tiles_of(batch, 8, cache.padding)):
        packed = [torch.cat([x, x.new_zeros(8, *x.shape[1:])])[8 * number :][:8] for x in qkv]
        count = min(8, len(whole) - 8 * number)
        found = run(part, cache, packed, spec)[:count]
        assert torch.equal(found, whole[8 * number :][:count])


@pytest.mark.parametrize("exact", [False, True])
def test_tokens_are_those_of_the_target(exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "Recorder", CountingRecorder)
    target = target_on_device()
    drafter = make_drafter(target, "p-eagle", layers=1).to(DEVICE)
    drafter.share_embedding(target.embedding)
    prompts, params = random_prompts(2, seed=2), SamplingParams(max_tokens=10, ignore_eos=True)
    alone = LLM(target, lookup=False).generate(prompts, params)
    llm = LLM(target, drafter, nodes=9, kv_tokens=96, backend=CudaBackend(exact=exact))
    found = llm.generate(prompts, params)
    assert [a.token_ids for a in found] == [a.token_ids for a in alone]
    assert all(a.stats.drafted > llm.engine.settings.k * a.stats.rounds for a in found)
    assert sum(sum(a.stats.accepted) for a in found) > 3
