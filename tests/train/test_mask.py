"""The training mask equals its definition, dense and as FlexAttention's."""

from typing import Any

import pytest
import torch
import torch._inductor.config as inductor
from drawn_elements import CASES, by_depth, elements_of, visible
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from peagle.methods.base import Elements
from peagle.model.attention import AttentionSpec, attention
from peagle.model.tensors import pad_rows
from peagle.train.attention import FlexStep, StepsAttend, block_mask, in_tiles

BLOCK = 128  # elements of a block of torch's BlockMask


def every(elements: Elements) -> range:
    return range(len(elements.anchor))


def brute_force(elements: Elements, documents: Tensor, window: int | None = None) -> Tensor:
    """DESIGN §5: depth 0 of the document with anchor ≤ a, and (a, d') with d' ≤ d; of these the
    newest positions, as many as the window has."""
    pairs = list(zip(elements.anchor.tolist(), elements.depth.tolist(), strict=True))
    rows = []
    for a, d in pairs:
        row = []
        for b, e in pairs:
            context = e == 0 and b <= a and documents[a] == documents[b]
            near = window is None or a + d - b - e < window
            row.append(bool(near and (context or (a == b and e <= d))))
        rows.append(row)
    return torch.tensor(rows)


@pytest.mark.parametrize("window", [None, 3, 20])
@pytest.mark.parametrize(("tokens", "depths", "seed"), CASES)
def test_masks_by_definition(tokens: int, depths: int, seed: int, window: int | None) -> None:
    """The dense one, and the rule of FlexAttention's."""
    elements, documents = elements_of(tokens, depths, seed)
    wanted = brute_force(elements, documents, window)
    assert torch.equal(visible(elements, documents, window), wanted)
    index, zero = torch.arange(len(elements.anchor)), torch.tensor(0)
    rule = block_mask(elements, documents, every(elements), window).mask_mod
    assert torch.equal(rule(zero, zero, index[:, None], index[None]), wanted)


@pytest.mark.parametrize("tokens", [150, 400])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_blocks_cover_the_mask(tokens: int, seed: int) -> None:
    """Whatever is visible lies in a listed block, and a full block hides nothing."""
    elements, documents = elements_of(tokens, 8, seed)
    if seed == 2:
        documents = torch.zeros_like(documents)
    made, true = block_mask(elements, documents, every(elements)), visible(elements, documents)
    size = -(-len(pad_rows(true)) // BLOCK)
    padded = torch.nn.functional.pad(true, (0, size * BLOCK - len(true)) * 2)
    blocks = padded.view(size, BLOCK, size, BLOCK).transpose(1, 2)
    listed = made.to_dense()[0, 0].bool()
    assert listed.shape == (size, size)
    assert not (blocks.flatten(2).any(-1) & ~listed).any()
    full, count = made.full_kv_indices[0, 0], made.full_kv_num_blocks[0, 0]
    whole = [(q, int(k)) for q in range(size) for k in full[q, : count[q]]]
    assert all(blocks[q, k].all() for q, k in whole if q < size - 1)
    assert whole if seed == 2 and tokens == 400 else True
    assert listed.sum() < size * size, "something is skipped"


def test_docstring_example() -> None:
    anchor, depth = torch.tensor([(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (0, 2)]).T
    elements = Elements(anchor, depth)
    mask = visible(elements, torch.zeros(4, dtype=torch.int64)).int().tolist()
    assert mask[4] == [1, 1, 0, 0, 1, 0]
    assert mask[5] == [1, 0, 0, 1, 0, 1]


def random_qkv(tokens: int) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randn(tokens, heads, 16, generator=g) for heads in (4, 2, 2)]


@pytest.mark.parametrize(("tokens", "depths", "seed"), CASES)
def test_flex_attention_equals_dense(tokens: int, depths: int, seed: int) -> None:
    """Its forward runs on the CPU, uncompiled; its backward needs CUDA."""
    assert_as_dense(*elements_of(tokens, depths, seed), flex_attention)


def assert_as_dense(elements: Elements, documents: Tensor, kernel: Any) -> None:
    """All elements in one forward, and a forward a depth."""
    qkv, spec = random_qkv(len(elements.anchor)), AttentionSpec(16**-0.5)
    dense = attention(*qkv, visible(elements, documents), spec)
    for counts in ([len(elements.anchor)], by_depth(elements)):
        attend = flex_attend(elements, documents, counts, kernel)
        with torch.no_grad():
            parts = [
                attend(0, *map(pad_rows, part), spec)[: len(part[0])]
                for part in zip(*(x.split(counts) for x in qkv), strict=True)
            ]
        torch.testing.assert_close(torch.cat(parts), dense)


def flex_attend(
    elements: Elements, documents: Tensor, counts: list[int], kernel: Any
) -> StepsAttend:
    tiled, steps = in_tiles(elements, counts)
    masks = [block_mask(tiled, documents, step) for step in steps]
    return StepsAttend([FlexStep(mask, kernel) for mask in masks])


# One kernel: no pool of processes that each import torch to compile it.
@inductor.patch(compile_threads=1)
def test_compiled_flex_attention_skips_blocks_rightly() -> None:
    """Only a compiled kernel goes by the blocks: the forward's runs on the CPU too."""
    elements, documents = elements_of(400, 8, 2)
    assert_as_dense(
        elements, torch.zeros_like(documents), torch.compile(flex_attention, dynamic=False)
    )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="FlexAttention's backward needs CUDA")
def test_flex_attention_gradient() -> None:
    elements, documents = elements_of(150, 6, 4)
    elements, documents = Elements(*(x.cuda() for x in elements)), documents.cuda()
    spec, kernel = AttentionSpec(16**-0.5), torch.compile(flex_attention, dynamic=True)
    count = len(elements.anchor)
    for counts in ([count], by_depth(elements)):
        flex, dense = ([x.cuda().requires_grad_() for x in random_qkv(count)] for _ in range(2))
        attend = flex_attend(elements, documents, counts, kernel)
        for part in zip(*(x.split(counts) for x in flex), strict=True):
            found = attend(0, *map(pad_rows, part), spec)[: len(part[0])]
            found.square().sum().backward(retain_graph=True)
        attention(*dense, visible(elements, documents), spec).square().sum().backward()
        for one, other in zip(flex, dense, strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-3)
