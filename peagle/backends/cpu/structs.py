"""The structures of native/, as ctypes. Those of one layout in float32 and bfloat16 are one."""

import ctypes

POINTER = ctypes.c_void_p
COUNT = ctypes.c_int64
FLOAT = ctypes.c_float
# A layer's products by their paths in models, and its norms, in the order of native/layer.h.
PRODUCTS = [f"self_attn.{name}_proj" for name in ("q", "k", "v", "o")]
PRODUCTS += [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
NORMS = ["input", "attention", "mlp_input", "mlp", "q", "k", "hidden"]
ACTIVATIONS = ["silu", "gelu_tanh"]


class Matrix(ctypes.Structure):
    """native/matrix.h. Pointers only: `Weights` keeps the memory."""

    _fields_ = [("data", POINTER), ("scales", POINTER), ("bias", POINTER)]
    _fields_ += [("bits", COUNT), ("tiled", COUNT), ("outputs", COUNT), ("inputs", COUNT)]


class Batch(ctypes.Structure):
    """native/attend.h."""

    alive: object  # the tensors that it points to
    _fields_ = [("rows", COUNT), ("requests", COUNT), ("table", COUNT), ("slot_mapping", POINTER)]
    _fields_ += [("block_tables", POINTER), ("query_lens", POINTER), ("seq_lens", POINTER)]
    _fields_ += [("tails", POINTER), ("longest", COUNT)]


class Kept(ctypes.Structure):
    """native/attention.h."""

    _fields_ = [("keys", POINTER), ("values", POINTER), ("heads", COUNT)]
    _fields_ += [("key_width", COUNT), ("value_width", COUNT)]


class Spec(ctypes.Structure):
    """native/attention.h: 0, or no pointer, where a layer has none."""

    _fields_ = [("scale", FLOAT), ("softcap", FLOAT), ("window", COUNT), ("sinks", POINTER)]


class Layer(ctypes.Structure):
    """native/layer.h; norms that a layer does not have are None."""

    alive: object  # the weights that it points to
    _fields_ = [(path, Matrix) for path in PRODUCTS]
    _fields_ += [(f"{name}_norm", POINTER) for name in NORMS]
    _fields_ += [("normed_residual", COUNT), ("window", COUNT), ("rope", COUNT)]


class Model(ctypes.Structure):
    """native/layer.h."""

    _fields_ = [("layers", POINTER), ("norm", POINTER), ("count", COUNT), ("width", COUNT)]
    _fields_ += [("head_dim", COUNT), ("activation", COUNT), ("eps", FLOAT), ("scale", FLOAT)]


class Forward(ctypes.Structure):
    """native/layer.h."""

    _fields_ = [("batch", POINTER), ("caches", POINTER), ("x", POINTER), ("embedding", POINTER)]
    _fields_ += [("cos", POINTER), ("sin", POINTER), ("taps", POINTER), ("tap_count", COUNT)]
    _fields_ += [("features", POINTER), ("out", POINTER), ("normed", POINTER), ("threads", COUNT)]


def check_sizes(library: ctypes.CDLL) -> None:
    """Assert that the structures are as large in the compiled library (native/library.cpp)."""
    structures = (Matrix, Batch, Kept, Spec, Layer, Model, Forward)
    compiled = (COUNT * len(structures)).in_dll(library, "struct_sizes")
    for structure, size in zip(structures, compiled, strict=True):
        assert ctypes.sizeof(structure) == size, f"{structure.__name__} is not that of native/"
