"""Descriptions of decoders from their config.json, and their weights from safetensors files.

Nothing here imports transformers' modelling code, which takes seconds.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from peagle.errors import InputError, first_line
from peagle.model.base_target import listed
from peagle.model.described import EMBEDDING, HEAD, NORM, Described, DescribedTarget, LayerFacts
from peagle.model.layer_config import FULL, SLIDING, Rope, rope_of

if TYPE_CHECKING:
    from peagle.model.target import Target

LINEARS = 7  # in a layer; the output head is one more
INDEX, WEIGHTS = "model.safetensors.index.json", "model.safetensors"
ALL = ("",)  # prefixes of all weights
FAMILIES = {"llama", "mistral", "qwen2", "qwen3", "gemma3_text"}
QK_NORM = {"qwen3", "gemma3_text"}
QKV, MLP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj", "down_proj")
SAME_KEYS = (
    "model_type", "hidden_size", "intermediate_size", "vocab_size", "num_attention_heads",
    "num_key_value_heads", "max_position_embeddings", "rms_norm_eps",
)  # fmt: skip
ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


def describe(config: Mapping[str, Any]) -> Described | None:
    """The description of a config.json of transformers; None where it does not say all."""
    family = config.get("model_type")
    if family not in FAMILIES:
        return None
    try:
        return _described(config, gemma=family == "gemma3_text")
    except (KeyError, TypeError, ZeroDivisionError):
        return None


def _described(config: Mapping[str, Any], *, gemma: bool) -> Described | None:
    activation = ACTIVATIONS.get(config["hidden_activation" if gemma else "hidden_act"])
    ropes = _ropes(config)
    if activation is None or ropes is None or config.get("use_bidirectional_attention"):
        return None
    width = config["hidden_size"]
    head_dim = config.get("head_dim") or width // config["num_attention_heads"]
    scale = config["query_pre_attn_scalar"] if gemma else head_dim
    return Described(
        **{name: config[name] for name in SAME_KEYS},
        head_dim=head_dim,
        activation=activation,
        attention_scale=scale**-0.5,
        embedding_scale=width**0.5 if gemma else 1.0,
        tied=config.get("tie_word_embeddings", gemma),
        biased=_biased(config),
        qk_norm=config["model_type"] in QK_NORM,
        sandwich=gemma,
        logit_softcap=config.get("final_logit_softcapping"),
        layers=tuple(_layers(config, list(ropes))),
        ropes=tuple(ropes.values()),
        dtype=config.get("dtype") or config.get("torch_dtype"),
    )


def _biased(config: Mapping[str, Any]) -> frozenset[str]:
    """Linear layers with a bias."""
    if config["model_type"] == "qwen2":
        return frozenset(QKV)
    attention = (*QKV, "o_proj") if config.get("attention_bias") else ()
    return frozenset((*attention, *(MLP if config.get("mlp_bias") else ())))


def _layers(config: Mapping[str, Any], kinds: list[str]) -> list[LayerFacts]:
    """Window and RoPE of each layer. Raises KeyError where they are not told apart."""
    count = config["num_hidden_layers"]
    mistral = config["model_type"] == "mistral"  # one window for all layers, or none
    types: list[str] | None = None if mistral else config.get("layer_types")
    if types is None and "sliding_window_pattern" in config:  # Gemma, before transformers 5
        pattern = config["sliding_window_pattern"]
        types = [SLIDING if (layer + 1) % pattern else FULL for layer in range(count)]
    if types is None and not config.get("use_sliding_window"):
        types = [SLIDING if mistral and config["sliding_window"] else FULL] * count
    if types is None or len(types) != count:
        raise KeyError("layer_types")
    windows = {FULL: 0, SLIDING: config.get("sliding_window") or 0}
    ropes = {kind: kinds.index(kind) if kind in kinds else 0 for kind in windows}
    return [LayerFacts(windows[kind], ropes[kind]) for kind in types]


def _ropes(config: Mapping[str, Any]) -> dict[str, Rope] | None:
    """RoPE by kind of layer, or of all layers as "". None: of a kind that is not described."""
    found = config.get("rope_parameters")
    if found is None:  # as transformers wrote them before version 5
        found = {"rope_theta": config["rope_theta"], **(config.get("rope_scaling") or {})}
        if "rope_local_base_freq" in config:
            found = {FULL: found, SLIDING: {"rope_theta": config["rope_local_base_freq"]}}
    tables = found if FULL in found else {"": found}
    ropes = {kind: rope_of(table) for kind, table in tables.items()}
    known = {kind: rope for kind, rope in ropes.items() if rope is not None}
    return known if len(known) == len(ropes) else None


def read_description(folder: Path) -> tuple[Described, list[int]] | None:
    """The description of a model's folder and the token ids that end an answer, of the generation
    config if it has any; None where the model's own code must run it."""
    config = _read(folder / "config.json")
    foreign = config.keys() & {"quantization_config", "auto_map"}
    whole = any((folder / name).is_file() for name in (INDEX, WEIGHTS))
    described = describe(config)
    if described is None or foreign or not whole:
        return None
    ends = config | _read(folder / "generation_config.json")
    return described, listed(ends.get("eos_token_id"))


def _read(file: Path) -> dict[str, Any]:
    """The object in a file; an empty one where there is none: transformers says what is wrong."""
    try:
        return dict(json.loads(file.read_text()))
    except (OSError, ValueError, TypeError):
        return {}


def read_weights(folder: Path, wanted: tuple[str, ...] = ALL) -> dict[str, Tensor]:
    """The weights of a folder whose names begin with a `wanted` prefix, mapped to memory. Raises
    InputError for files that are missing, damaged or lead out of the folder."""
    tensors = dict[str, Tensor]()
    for file in weight_files(folder, wanted):
        try:
            with safe_open(file, framework="pt") as opened:
                names = [name for name in opened.keys() if name.startswith(wanted)]  # noqa: SIM118
                tensors |= {name: opened.get_tensor(name) for name in names}
        except (OSError, SafetensorError) as error:
            raise InputError(f"{file}: {first_line(error)}", fix="download it again") from error
    return tensors


def weight_files(folder: Path, wanted: tuple[str, ...] = ALL) -> list[Path]:
    """The files of weights whose names begin with a `wanted` prefix. Raises InputError for a
    damaged index."""
    index = folder / INDEX
    if not index.is_file():
        return [folder / WEIGHTS]
    try:
        files = json.loads(index.read_text())["weight_map"].items()
        names = {file for name, file in files if name.startswith(wanted)}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise InputError(f"{index}: no weight_map", fix="download it again") from error
    if outside := [name for name in names if Path(name).name != name]:
        raise InputError(f"{index}: {outside[0]!r} is not in the folder")
    return [folder / name for name in sorted(names)]


def describe_target(target: "Target") -> DescribedTarget | None:
    """A loaded target by its description; None unless it is a model of transformers as it was
    published, whose linear layers are plain."""
    model = target.model
    parts = [model, target.decoder, *target.layers]
    published = all(type(part).__module__.startswith("transformers.models.") for part in parts)
    linears = [part for part in model.modules() if isinstance(part, nn.Linear)]
    plain = all(type(part) is nn.Linear and part.weight.dtype == target.dtype for part in linears)
    plain &= len(linears) == LINEARS * target.num_layers + 1  # others are quantised, or adapters
    config = describe(target.config.to_dict()) if published and plain else None
    # Quantised layers, which are not described, would restore their weights for a state dict.
    tensors = {} if config is None else model.state_dict()
    if config is None or EMBEDDING not in tensors:  # a decoder inside a multimodal model
        return None
    return DescribedTarget(config, tensors, target.tokenizer, target.name, target.end_ids)


def check_weights(config: Described, tensors: Mapping[str, Tensor]) -> None:
    """Raises InputError for weights that are missing or of another shape."""
    for name, shape in _shapes(config, HEAD in tensors):
        if name not in tensors:
            raise InputError(f"missing tensor {name!r}")
        if (found := list(tensors[name].shape)) != shape:
            raise InputError(f"tensor {name} has shape {found}, expected {shape}")


def _shapes(config: Described, has_head: bool) -> Iterator[tuple[str, list[int]]]:
    """Names and shapes of the weights that must be there."""
    width = config.hidden_size
    inner = config.intermediate_size
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
    if has_head or not config.tied:
        yield HEAD, [config.vocab_size, width]
