"""Products on ARM: native code compiled for it and run in an emulator gives what float64 gives.

Needs g++ for ARM and qemu (Debian: `g++-aarch64-linux-gnu`, `qemu-user`).
"""

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from test_products import DTYPES, KINDS, STEP, as_multiplied, exact_weight, linear, native, shapes
from torch import Tensor

from peagle.backends.cpu import library, matrix

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
# Plain NEON, and what has products of four bytes.
PROCESSORS = {"armv8-a": "cortex-a53", "armv8.2-a+dotprod": "neoverse-n1"}
SOURCE = Path(__file__).with_name("products.cpp")


@pytest.fixture(scope="module", params=PROCESSORS)
def command(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The program that multiplies."""
    for tool in (COMPILER, EMULATOR):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    made = tmp_path_factory.mktemp("neon") / "products"
    flags = [flag for flag in library.FLAGS if not flag.startswith(("-march", "--param"))]
    flags += [f"-march={request.param}", f"-I{library.SOURCES}", "-static"]
    subprocess.run([COMPILER, *flags, str(SOURCE), "-o", str(made)], check=True)
    return [EMULATOR, "-cpu", PROCESSORS[request.param], str(made)]


def raw(tensor: Tensor | None) -> bytes:
    return (
        b"" if tensor is None else tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_products_on_arm(
    kind: str, dtype: torch.dtype, command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matrix, "fits_tiles", lambda _: False)  # ARM has none
    for outputs, inputs in shapes(kind):
        layer = linear(outputs, inputs, dtype)
        made = native(layer, kind)
        x = torch.randn(9, inputs).to(dtype)
        sizes = torch.tensor([made.weights.bits, outputs, inputs, len(x), dtype.itemsize])
        parts = [made.weights.data, made.weights.scales, layer.bias, x]
        given = b"".join(len(raw(part)).to_bytes(8, "little") + raw(part) for part in parts)
        done = subprocess.run(command, input=raw(sizes) + given, capture_output=True, check=True)
        found = torch.frombuffer(bytearray(done.stdout), dtype=dtype).view(len(x), outputs)
        exact = as_multiplied(x, made) @ exact_weight(layer.weight, kind).T + layer.bias.double()
        error = (found.double() - exact).abs() - exact.abs() * STEP[dtype]
        assert (error <= 2e-5 * exact.norm(dim=1, keepdim=True)).all(), (outputs, inputs)
