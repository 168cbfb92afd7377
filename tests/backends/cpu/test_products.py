"""Native products: what float64 gives, within rounding, whatever rows stand beside a row."""

import pytest
import torch
from torch import Tensor, nn

from peagle.backends.cpu import library
from peagle.backends.cpu.matrix import GROUP, CpuLinear, Weights, round_int4
from peagle.model.int8 import round_int8

KINDS = ("plain", "int8", "int4")
DTYPES = (torch.float32, torch.bfloat16)
STEP = {torch.float32: 2.0**-20, torch.bfloat16: 2.0**-8}  # rounding of a sum
SHAPES = [(96, 64), (97, 96), (50, 1536), (16, 32), (3, 224), (48, 8192)]  # the last in two parts
RAGGED = [(97, 33), (5, 7), (40, 1), (17, 575)]


def linear(outputs: int, inputs: int, dtype: torch.dtype) -> nn.Linear:
    return nn.Linear(inputs, outputs).to(dtype).requires_grad_(False)


def native(layer: nn.Linear, kind: str) -> CpuLinear:
    return CpuLinear.of(layer, None if kind == "plain" else kind)


def exact_weight(weight: Tensor, kind: str) -> Tensor:
    if kind == "int8":
        q, scale = round_int8(weight, weight.dtype)
        return q.double() * scale.double()[:, None]
    if kind == "int4":
        q, *scales = round_int4(weight)
        scale, zero = (part.double().repeat_interleave(GROUP, dim=1) for part in scales)
        return (q.double() - 8) * scale + zero
    return weight.double()


def as_multiplied(x: Tensor, made: CpuLinear) -> Tensor:
    """x as float64; where bytes are multiplied, each group of it rounded to 8 bits."""
    if made.weights.bits > 8 or made.weights.tiled:
        return x.double()
    missing = -x.shape[1] % GROUP
    groups = nn.functional.pad(x.float(), (0, missing)).unflatten(1, (-1, GROUP))
    most = groups.abs().amax(-1, keepdim=True)
    inverse = torch.full_like(most, 127) / most  # `127 / most` is rounded twice
    whole = torch.where(most > 0, (groups * inverse).round(), 0)
    return (whole.double() * (most / 127).double()).flatten(1)[:, : x.shape[1]]


def shapes(kind: str) -> list[tuple[int, int]]:
    return SHAPES if kind == "int4" else SHAPES + RAGGED


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_products_are_those_of_the_weights(kind: str, dtype: torch.dtype) -> None:
    for outputs, inputs in shapes(kind):
        layer = linear(outputs, inputs, dtype)
        made, weight = native(layer, kind), exact_weight(layer.weight, kind)
        x = torch.randn(70, inputs).to(dtype)
        exact = as_multiplied(x, made) @ weight.T + layer.bias.double()
        error = (made(x).double() - exact).abs() - exact.abs() * STEP[dtype]
        assert (error <= 2e-5 * exact.norm(dim=1, keepdim=True)).all(), (outputs, inputs)


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_does_not_depend_on_the_rows_beside_it(kind: str, dtype: torch.dtype) -> None:
    for outputs, inputs in shapes(kind):
        made = native(linear(outputs, inputs, dtype), kind)
        x = torch.randn(70, inputs).to(dtype)
        together = made(x)
        for rows in range(1, 71):
            assert torch.equal(made(x[:rows]), together[:rows]), (outputs, inputs, rows)
        assert torch.equal(made(x[40:41]), together[40:41])
        assert torch.equal(made(x[40:53]), together[40:53])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_weights_can_be_read(kind: str, dtype: torch.dtype) -> None:
    layer = linear(80, 608, dtype)
    made, exact = native(layer, kind), exact_weight(layer.weight, kind)
    least = 1e-6 * float(exact.abs().max())
    torch.testing.assert_close(made.weight, exact.to(dtype), rtol=STEP[dtype], atol=least)
    assert made.state_dict().keys() == layer.state_dict().keys()
    assert torch.equal(made.state_dict()["weight"], made.weight)


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_sums_of_the_largest_numbers_fit(kind: str) -> None:
    layer = linear(32, 64, torch.float32)
    layer.weight[:] = 1
    layer.weight[:, ::GROUP] = -1  # so that all others are the largest number of 4 bits
    layer.weight[::2] *= -1
    made, weight = native(layer, kind), exact_weight(layer.weight, kind)
    x = torch.tensor([1.0, -1.0])[:, None].expand(2, 64)
    exact = x.double() @ weight.T + layer.bias.double()
    torch.testing.assert_close(made(x).double(), exact, rtol=1e-6, atol=1e-4)


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_what_8_bits_of_the_rows_cost(kind: str) -> None:
    """Half a step of 127 in each group, at the most."""
    layer = linear(96, 256, torch.float32)
    x = torch.randn(20, 256) * torch.logspace(-3, 3, 256)
    x[3] = 0
    made, weight = native(layer, kind), exact_weight(layer.weight, kind)
    exact = x.double() @ weight.T + layer.bias.double()
    steps = x.unflatten(1, (-1, GROUP)).abs().amax(-1).double() / 127
    most = (steps / 2) @ weight.abs().unflatten(1, (-1, GROUP)).sum(-1).T
    assert ((made(x).double() - exact).abs() <= most * 1.001 + 1e-4).all()
    assert torch.equal(made(x)[3], layer.bias)


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_finite_is_not_hidden(kind: str, dtype: torch.dtype) -> None:
    """A row with such a number, or a whole group, has no finite output; all others stay."""
    made = native(linear(96, 64, dtype), kind)
    x, others = torch.randn(5, 64).to(dtype), [0, 1, 2, 4]
    row, wanted = x[3].clone(), made(x)[others]
    for value in (torch.nan, torch.inf, -torch.inf):
        for columns in (slice(5, 6), slice(GROUP, 2 * GROUP)):
            x[3] = row
            x[3, columns] = value
            found = made(x)
            assert not found[3].isfinite().any()
            assert found[3].isnan().all() or abs(value) == torch.inf
            assert torch.equal(found[others], wanted)


def test_rows_and_shapes() -> None:
    """Leading dimensions stay, and what does not lie row by row is taken, too."""
    made = CpuLinear.of(linear(16, 32, torch.float32))
    x = torch.randn(2, 3, 32)
    assert made(x).shape == (2, 3, 16)
    wide = torch.randn(32, 5).T
    assert torch.equal(made(wide), made(wide.contiguous()))
    assert made(x[:0]).shape == (0, 3, 16)


def test_only_amx_reads_tiles() -> None:
    weights = Weights.plain(linear(16, 32, torch.bfloat16).weight)
    assert weights.tiled == library.load().tiles
