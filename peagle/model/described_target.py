"""Targets that native code runs by their description, read without transformers' modelling code.

Shapes: V vocabulary, E hidden, I intermediate, N and M query and key/value heads, H head size.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from peagle.errors import InputError, first_line
from peagle.model.attention import HeadShape
from peagle.model.base_target import BaseTarget, listed
from peagle.model.described import Described, describe

INDEX, WEIGHTS = "model.safetensors.index.json", "model.safetensors"
EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


class DescribedTarget(BaseTarget):
    """A target by its description and its weights, on the CPU."""

    config: Described

    def __init__(
        self,
        config: Described,
        tensors: Mapping[str, Tensor],
        tokenizer: PreTrainedTokenizerBase | None,
        name: str,
        end_ids: list[int],
        quantize: str | None = None,
    ) -> None:
        """`tensors`: weights by their names in transformers' checkpoints, of one dtype. `quantize`:
        int8 or int4, in which the backend keeps them. Raises InputError for weights that are
        missing or of another shape."""
        _check_shapes(config, tensors)
        self.name, self.config, self.tensors = name, config, tensors
        self.tokenizer, self.end_ids, self.quantize = tokenizer, end_ids, quantize
        self.device, self.dtype = torch.device("cpu"), tensors[EMBEDDING].dtype
        shape = HeadShape(config.num_key_value_heads, config.head_dim, config.head_dim)
        self.kv_shapes = [shape] * len(config.layers)
        self.window = max(layer.window or self.max_context for layer in config.layers)

    @property
    def embedding(self) -> Tensor:
        """See `BaseTarget.embedding`."""
        return self.tensors[EMBEDDING]

    def layer_weights(self, layer: int) -> Mapping[str, Tensor]:
        """See `BaseTarget.layer_weights`."""
        prefix = f"model.layers.{layer}."
        return {
            name.removeprefix(prefix): tensor
            for name, tensor in self.tensors.items()
            if name.startswith(prefix)
        }


def read_description(folder: Path) -> Described | None:
    """The description of a model's folder; None where its own code must run it."""
    try:
        raw = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):  # transformers says what is wrong
        return None
    own = isinstance(raw, dict) and "quantization_config" not in raw and "auto_map" not in raw
    whole = any((folder / name).is_file() for name in (INDEX, WEIGHTS))
    return describe(raw) if own and whole else None


def read_weights(folder: Path, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """The weights of a folder, mapped to memory; in `dtype`, or as they are. Raises InputError for
    files that are missing, damaged or lead out of the folder."""
    tensors = dict[str, Tensor]()
    for file in _files(folder):
        try:
            with safe_open(file, framework="pt") as opened:
                tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise InputError(f"{file}: {first_line(error)}", fix="download it again") from error
    return tensors if dtype is None else {name: t.to(dtype) for name, t in tensors.items()}


def _files(folder: Path) -> list[Path]:
    index = folder / INDEX
    if not index.is_file():
        return [folder / WEIGHTS]
    try:
        names = set(json.loads(index.read_text())["weight_map"].values())
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise InputError(f"{index}: no weight_map", fix="download it again") from error
    if outside := [name for name in names if Path(name).name != name]:
        raise InputError(f"{index}: {outside[0]!r} is not in the folder")
    return [folder / name for name in sorted(names)]


def read_end_ids(folder: Path) -> list[int]:
    """Token ids that end an answer: of the generation config, else of the config."""
    for name in ("generation_config.json", "config.json"):
        try:
            raw = json.loads((folder / name).read_text())
        except (OSError, ValueError):
            continue
        if "eos_token_id" in raw:
            return listed(raw["eos_token_id"])
    return []


def _check_shapes(config: Described, tensors: Mapping[str, Tensor]) -> None:
    dtype = None
    for name, shape in _shapes(config):
        if name not in tensors:
            raise InputError(f"missing tensor {name!r}")
        found = tensors[name]
        if list(found.shape) != shape:
            raise InputError(f"tensor {name} has shape {list(found.shape)}, expected {shape}")
        dtype = dtype or found.dtype
        if found.dtype != dtype:
            raise InputError(f"tensor {name} is {found.dtype}, others are {dtype}")


def _shapes(config: Described) -> Iterator[tuple[str, list[int]]]:
    """Names and shapes of the weights that must be there."""
    width, inner = config.hidden_size, config.intermediate_size
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    layer = {
        "self_attn.q_proj": [queries, width],
        "self_attn.k_proj": [keys, width],
        "self_attn.v_proj": [keys, width],
        "self_attn.o_proj": [width, queries],
        "mlp.gate_proj": [inner, width],
        "mlp.up_proj": [inner, width],
        "mlp.down_proj": [width, inner],
        "input_layernorm": [width],
        "post_attention_layernorm": [width],
    }
    if config.sandwich:
        layer |= {"pre_feedforward_layernorm": [width], "post_feedforward_layernorm": [width]}
    if config.qk_norm:
        layer |= {"self_attn.q_norm": [config.head_dim], "self_attn.k_norm": [config.head_dim]}
    yield EMBEDDING, [config.vocab_size, width]
    for number in range(len(config.layers)):
        for name, shape in layer.items():
            yield f"model.layers.{number}.{name}.weight", shape
            if name.partition(".")[2] in config.biased:
                yield f"model.layers.{number}.{name}.bias", shape[:1]
    yield NORM, [width]
    if not config.tied:
        yield HEAD, [config.vocab_size, width]
