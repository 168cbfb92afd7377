"""peagle/native as torch functions: compiled at first use, in a few seconds, and kept in the user's
cache. Without a C++ compiler torch does the same in more and slower steps.

Shapes: T tokens, N query heads, M key/value heads, H head size, D hidden.
"""

import ctypes
import hashlib
import logging
import os
import platform
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from peagle.config import cache_dir, first_line
from peagle.model.attend import AttentionSpec

SOURCES = Path(__file__).parents[1] / "native"
FLAGS = ["-std=c++17", "-O3", "-march=native", "-fopenmp", "-fPIC"]
FLAGS += ["-fno-math-errno", "-fno-trapping-math"]  # without which loops of floor stay loops
LANES = 16  # keys that are read together: a block has a multiple of them
DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
POINTER, COUNT, THREADS = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
ARGUMENTS = {
    "norm": [*[POINTER] * 3, COUNT, COUNT, ctypes.c_float, THREADS],
    "rotate": [*[POINTER] * 4, COUNT, COUNT, COUNT, THREADS],
    "gate": [*[POINTER] * 3, COUNT, COUNT, THREADS],
    "layers": [*[POINTER] * 6, COUNT, *[POINTER] * 7, ctypes.c_float, ctypes.c_float, THREADS],
    "linear": [*[POINTER] * 4, COUNT, COUNT, THREADS],
    "attend": [*[POINTER] * 6, COUNT, *[POINTER] * 3, THREADS],
}

log = logging.getLogger(__name__)


class Spans:
    """Which queries of a packed forward see which blocks, as the library wants it. Of each span:
    its first packed token, that token's position, the number of tokens, and the span's blocks."""

    def __init__(self, spans: Sequence[tuple[int, int, int, Sequence[int]]], size: int) -> None:
        table, blocks = list[int](), list[int]()
        for token, start, length, own in spans:
            table += [token, start, length, len(blocks)]
            blocks += own[: -(-(start + length) // size)]
        self.count = len(spans)
        self.table = (ctypes.c_int64 * len(table))(*table)
        self.blocks = (ctypes.c_int64 * len(blocks))(*blocks)


def usable(x: Tensor, *others: Tensor) -> bool:
    """Whether the functions here may take these tensors: on a CPU, of one dtype they know, packed
    closely, and not to be differentiated."""
    dtype = x.dtype
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or dtype not in DTYPES:
        return False
    for tensor in (x, *others):
        if not tensor.is_cpu or tensor.dtype != dtype or not tensor.is_contiguous():
            return False
    return library() is not None


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of x (…, D)."""
    out = torch.empty_like(x)
    width = x.shape[-1]
    function("norm", x.dtype)(
        x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.numel() // width, width, eps,
        torch.get_num_threads(),
    )  # fmt: skip
    return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE of x (T, heads, H) by cos and sin (T, 1, H), the first half of sin negated."""
    out = torch.empty_like(x)
    function("rotate", x.dtype)(
        x.data_ptr(), cos.data_ptr(), sin.data_ptr(), out.data_ptr(), *x.shape,
        torch.get_num_threads(),
    )  # fmt: skip
    return out


def gate(x: Tensor, up: Tensor) -> Tensor:
    """silu(x) · up, both (…, D)."""
    out = torch.empty_like(x)
    width = x.shape[-1]
    function("gate", x.dtype)(
        x.data_ptr(), up.data_ptr(), out.data_ptr(), x.numel() // width, width,
        torch.get_num_threads(),
    )  # fmt: skip
    return out


class Matrix(NamedTuple):
    """Weights (O, I) of a product where there are `tiles`; I is a multiple of 32, O of 16."""

    data: Tensor  # bf16 as they lie; of fewer bits in the library's order (model/quantized.py)
    scales: Tensor | None  # of 8 bits: (O,)
    bits: int
    outputs: int
    inputs: int

    def words(self) -> tuple[int, int | None, int, int]:
        """As the library wants it."""
        scales = None if self.scales is None else self.scales.data_ptr()
        return self.data.data_ptr(), scales, self.bits, self.outputs


def linear(x: Tensor, matrix: Matrix, bias: Tensor | None) -> Tensor:
    """x (…, I) in bf16 times a matrix."""
    out = x.new_empty(*x.shape[:-1], matrix.outputs)
    function("linear", x.dtype)(
        x.data_ptr(), (POINTER * 4)(*matrix.words()), None if bias is None else bias.data_ptr(),
        out.data_ptr(), x.numel() // matrix.inputs, matrix.inputs, torch.get_num_threads(),
    )  # fmt: skip
    return out


def attend(  # noqa: PLR0913
    q: Tensor, keys: Tensor, values: Tensor, out: Tensor, spans: Spans, spec: AttentionSpec
) -> None:
    """Causal attention of spans of q (T, N, H) over their keys and values (blocks, size, M, H),
    into their rows of `out`; a row's result depends on its own query and keys alone."""
    sinks = spec.sinks.float().contiguous() if spec.sinks is not None else None
    sizes = (q.shape[1], *keys.shape[1:], values.shape[3], spec.window or 0)
    function("attend", q.dtype)(
        q.data_ptr(), keys.data_ptr(), values.data_ptr(), out.data_ptr(),
        (ctypes.c_int64 * 6)(*sizes), spans.table, spans.count, spans.blocks,
        (ctypes.c_float * 2)(spec.scale, spec.softcap or 0.0),
        None if sinks is None else sinks.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip


class Paged(NamedTuple):
    """Where the keys and values of some layers are, and who sees which."""

    caches: list[tuple[Tensor, Tensor]]  # of each layer, (blocks, size, M, H)
    slots: Tensor  # (T,) int64: where those of this forward are kept
    spans: Spans


class LayerWeights:
    """A layer as `layers` reads it."""

    def __init__(
        self,
        products: Sequence[Matrix],
        norms: Sequence[Tensor | None],
        head: int,
        eps: float,
        *,
        normed_residual: bool = False,
    ) -> None:
        """q, k, v, o, gate, up, down, and the norms before and between, of queries and keys, and of
        the feature in a head's first layer, None where there are none."""
        self.kept = products, norms  # alive
        words = [word for product in products for word in product.words()]
        words += [None if norm is None else norm.data_ptr() for norm in norms]
        words.append(int(normed_residual))
        self.words = (POINTER * len(words))(*words)
        self.kv_heads, self.head, self.eps = products[1].outputs // head, head, eps


def layers(  # noqa: PLR0913
    x: Tensor,
    weights: Sequence[LayerWeights],
    cos: Tensor,
    sin: Tensor,
    paged: Paged,
    scale: float,
    *,
    embedding: Tensor | None = None,
    taps: Sequence[int] = (),
) -> tuple[Tensor, Tensor]:
    """Decoder layers of Llama or Qwen3, one after another and of one shape, on x (T, D), where
    there are `tiles`; their keys and values are kept. There may be more rows than slots: padding.
    A head's first layer reads `embedding` (T, D) as well. Returns what leaves the last layer, and
    what enters those of number `taps`, side by side (T, F·D)."""
    rows, width = x.shape
    out, features = torch.empty_like(x), x.new_empty(rows, len(taps) * width)
    keys, first = paged.caches[0][0], weights[0]
    sizes = (rows, len(paged.slots), width, first.head, keys.shape[1], paged.spans.count, len(taps))
    caches = [part.data_ptr() for pair in paged.caches for part in pair]
    function("layers", x.dtype)(
        x.data_ptr(), None if embedding is None else embedding.data_ptr(), out.data_ptr(),
        (COUNT * len(taps))(*taps), features.data_ptr(),
        (POINTER * len(weights))(*(ctypes.addressof(layer.words) for layer in weights)),
        len(weights), cos.data_ptr(), sin.data_ptr(), (POINTER * len(caches))(*caches),
        paged.slots.data_ptr(), (COUNT * len(sizes))(*sizes), paged.spans.table,
        paged.spans.blocks, first.eps, scale, torch.get_num_threads(),
    )  # fmt: skip
    return out, features


@cache
def tiles() -> bool:
    """Whether this CPU multiplies by tiles (AMX), and `linear` may be called."""
    found = library()
    return found is not None and bool(found.has_tiles())


@cache
def function(name: str, dtype: torch.dtype) -> "ctypes._NamedFuncPointer":
    """A function of the library for tensors of a dtype."""
    found = library()
    assert found is not None
    pointer = getattr(found, f"{name}_{DTYPES[dtype]}")
    pointer.argtypes, pointer.restype = ARGUMENTS[name], None
    return pointer


@cache
def library() -> ctypes.CDLL | None:
    """The compiled functions; None, and a line in the log, where they cannot be compiled."""
    try:
        return ctypes.CDLL(str(_compiled()))
    except subprocess.CalledProcessError as error:
        said = error.stderr.strip().splitlines() or [str(error)]
        log.warning("slower without native code: %s", said[-1])
    except FileNotFoundError as error:
        why = f"there is no C++ compiler {error.filename!r}: install g++, or name one in $CXX"
        log.warning("slower without native code: %s", why)
    except (OSError, RuntimeError) as error:  # no folder, no home
        log.warning("slower without native code: %s", first_line(error))
    return None


def _compiled() -> Path:
    """The shared library, from the cache or made: one for each source and processor. OpenMP is not
    linked: it is the one that torch has loaded, and so there is one set of threads."""
    texts = [path.read_text() for path in sorted(SOURCES.iterdir())]
    key = hashlib.sha256(repr((texts, FLAGS, _processor())).encode()).hexdigest()[:16]
    path = cache_dir() / f"native-{key}.so"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            parts = [Path(scratch, name) for name in ("native.o", "native.so")]
            compiler = os.environ.get("CXX", "c++")
            _run(compiler, *FLAGS, "-c", str(SOURCES / "library.cpp"), "-o", str(parts[0]))
            _run(compiler, "-shared", str(parts[0]), "-o", str(parts[1]))
            parts[1].rename(path)
    return path


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


def _processor() -> str:
    """What `-march=native` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    named = ("model name", "flags", "Features")
    return "".join(sorted({line for line in lines if line.startswith(named)}))
