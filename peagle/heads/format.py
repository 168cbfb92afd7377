"""Reading heads. Two dialects are read and written (`save.py`): vLLM/AWS (also ours), speculators.

Ours is the vLLM/AWS dialect, where a head that trained only the mask token's embedding stores that
one row as `mask_embedding` (vLLM wants the whole table: `peagle export` makes it), plus a
`peagle` block in config.json with what the head was trained against. A correction lies in a folder
of its own (`correction.py`). Ours may hold matrices as int8 rows `NAME` (O, I) with a scale each,
`NAME_scale` (O,), and then has "dtype" int8; they are read as float32 (`model/int8.py`).
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from peagle.errors import InputError, first_line
from peagle.heads.correction import FOLDER, PREFIX, parse_correction
from peagle.methods.keys import FLAGS, LAYER_IDS, MASK_ID_KEYS, SPECULATORS, mask_ids
from peagle.methods.registry import METHODS
from peagle.model.config import TRANSFORMERS, DrafterConfig, Provenance, default_feature_layers
from peagle.model.int8 import SCALE, restore_int8

log = logging.getLogger(__name__)

INDEX = "model.safetensors.index.json"
REMEDY = "download or export the head again, config.json and tensors together"


@dataclass(frozen=True, slots=True)
class HeadFiles:
    """config.json and tensors as they are, however damaged."""

    raw: dict[str, Any]  # under `correction` that of a correction
    tensors: dict[str, Tensor]  # by our names, those of a correction included

    @property
    def speculators(self) -> bool:
        return SPECULATORS in self.raw

    @property
    def sizes(self) -> dict[str, Any]:
        """Sizes of the drafter's layers."""
        return dict(self.raw["transformer_layer_config"]) if self.speculators else self.raw

    @property
    def ours(self) -> dict[str, Any]:
        """What peagle wrote about the head; empty for heads made elsewhere."""
        return self.raw.get("peagle") or {}

    @property
    def trained(self) -> Provenance:
        return Provenance(**self.ours.get("provenance", {}))

    @property
    def target_width(self) -> int:
        return int(self.raw.get("target_hidden_size") or self.sizes["hidden_size"])


def read_head(folder: Path) -> HeadFiles:
    """The files of a head. Raises InputError for those that cannot be read."""
    return HeadFiles(read_json(folder), read_tensors(folder))


def read_config(folder: Path, target_layers: int | None = None) -> DrafterConfig:
    """The drafter's configuration from either dialect's config.json."""
    return parse(read_json(folder), folder / "config.json", target_layers)


def read_json(folder: Path) -> dict[str, Any]:
    """The config.json of a head, and under `correction` that of its correction. Raises InputError
    when one is missing or no JSON object."""
    raw = _read_object(folder / "config.json")
    if (folder / FOLDER).is_dir():
        raw[FOLDER] = _read_object(folder / FOLDER / "config.json")
    return raw


def _read_object(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise InputError(f"head {file.parent}: no {file.name}")
    try:
        return dict(json.loads(file.read_text()))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise InputError(f"{file}: not a JSON object ({first_line(error)}); {REMEDY}") from error


def parse(raw: Mapping[str, Any], file: Path, target_layers: int | None) -> DrafterConfig:
    """The configuration that the config.json of a head, read from `file`, describes."""
    try:
        return _parse(raw, target_layers)
    except KeyError as error:
        raise InputError(f"{file}: missing {error.args[0]!r}") from error
    except (ValueError, TypeError, AttributeError, StrictDataclassError) as error:
        raise InputError(f"{file}: {first_line(error)}") from error


def _parse(raw: Mapping[str, Any], target_layers: int | None) -> DrafterConfig:
    files = HeadFiles(dict(raw), {})
    sizes, ours = files.sizes, files.ours
    kind = sizes.get("model_type", "llama")
    if kind not in TRANSFORMERS:
        raise InputError(f"model_type {kind!r}: heads have llama or qwen3 layers")
    eagle = raw.get("eagle_config") or {}
    layers = raw.get(LAYER_IDS) or eagle.get(LAYER_IDS)
    if not layers and target_layers is not None:
        layers = default_feature_layers(target_layers)
    method = _method(raw)
    flags = {flag: bool(eagle.get(flag, raw.get(flag, False))) for flag in FLAGS}
    if files.speculators and not METHODS[method].parallel and "norm_before_residual" not in raw:
        flags["norm_before_residual"] = True  # what speculators and vLLM take when it is absent
    return DrafterConfig(
        method=method,
        transformer=TRANSFORMERS[kind].from_dict(_without_ours(sizes)),
        feature_layers=tuple(layers or ()),
        draft_vocab_size=raw.get("draft_vocab_size") or sizes["vocab_size"],
        target_hidden_size=files.target_width,
        mask_token_id=next(iter(mask_ids(raw).values()), None),
        depths=ours.get("depths", _proposed(raw)),
        embedding=ours.get("embedding", "full"),
        logit_scale=sizes.get("logit_scale", 1.0),
        correction=parse_correction(raw.get(FOLDER, {})),
        provenance=files.trained,
        **flags,
    )


def _method(raw: Mapping[str, Any]) -> str:
    """The name of a head's method: as we recorded it, or the one that knows its keys."""
    claiming = [name for name, method in METHODS.items() if method.claims(raw)]
    if not claiming:
        raise InputError(f"{SPECULATORS} {raw.get(SPECULATORS)!r}: expected peagle or eagle3")
    named = (raw.get("peagle") or {}).get("method", claiming[0])
    if named not in METHODS:
        raise InputError(f"peagle.method {named!r}: known are {', '.join(METHODS)}")
    if named not in claiming:
        why = f"peagle.method is {named!r}, the other keys are those of {claiming[0]}"
        raise InputError(f"{why}; {REMEDY}")
    return str(named)


def _proposed(raw: Mapping[str, Any]) -> int | None:
    """Draft tokens that speculators' config names; None where nothing does."""
    methods = (raw.get("speculators_config") or {}).get("proposal_methods") or [{}]
    tokens = methods[0].get("speculative_tokens")
    return tokens if tokens is None else int(tokens)


def _without_ours(sizes: dict[str, Any]) -> dict[str, Any]:
    """Keys of a Llama or Qwen3 config: the others are read into DrafterConfig, or not ours."""
    foreign = {
        "architectures", "eagle_config", LAYER_IDS, "draft_vocab_size", "peagle", "dflash_config",
        "target_hidden_size", "logit_scale", FOLDER, "parallel_drafting", "dtype", "torch_dtype",
        "transformers_version", *MASK_ID_KEYS, *FLAGS,
    }  # fmt: skip
    if sizes.get("rope_parameters"):  # the same, for readers with transformers 4
        foreign |= {"rope_theta", "rope_scaling"}
    return {key: value for key, value in sizes.items() if key not in foreign}


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a head by our names, with those of its correction. Safetensors only.

    Raises InputError for files that are missing, damaged, or hold the same tensor.
    """
    tensors = _read_folder(folder)
    if (folder / FOLDER).is_dir():
        own = {PREFIX + name: tensor for name, tensor in _read_folder(folder / FOLDER).items()}
        if twice := sorted(tensors.keys() & own):
            raise InputError(f"head {folder}: {twice[0]!r} is there and in {FOLDER}/; {REMEDY}")
        tensors |= own
    return tensors


def _read_folder(folder: Path) -> dict[str, Tensor]:
    tensors, origins = dict[str, Tensor](), dict[str, str]()
    for file, wanted in _weight_files(folder).items():
        for stored, tensor in _read_file(file, wanted).items():
            name, origin = _our_name(stored), f"{stored!r} of {file.name}"
            if name in tensors:
                why = f"{origins[name]} and {origin} are the same tensor"
                raise InputError(f"head {folder}: {why}; {REMEDY}")
            tensors[name], origins[name] = tensor, origin
    rows = {name.removesuffix(SCALE) for name in tensors if name.endswith(SCALE)}
    rows |= {name for name, tensor in tensors.items() if tensor.dtype == torch.int8}
    for name in sorted(rows):
        tensors[name] = _weight(folder, name, tensors.get(name), tensors.pop(name + SCALE, None))
    return tensors


def _weight_files(folder: Path) -> Mapping[Path, set[str] | None]:
    """Files to read, and the names of the tensors wanted of each; None: all of them. As in vLLM an
    index decides, and without one every safetensors file is read."""
    files = set(folder.glob("*.safetensors"))
    index = folder / INDEX
    if not index.is_file():
        if not files:
            raise InputError(f"head {folder}: no .safetensors file (pickles are not loaded)")
        return dict.fromkeys(sorted(files))
    weight_map = _read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(f"{index}: weight_map is not an object of tensors and files; {REMEDY}")
    wanted = dict[Path, set[str]]()
    for tensor, name in weight_map.items():
        file = folder / str(name)
        if file.name != name or file.suffix != ".safetensors":
            why = f"{tensor!r} is in {name!r}, which is no .safetensors file of this folder"
            raise InputError(f"{index}: {why}; {REMEDY}")
        wanted.setdefault(file, set()).add(tensor)
    if missing := sorted(wanted.keys() - files):
        raise InputError(f"{index}: {missing[0].name!r} is missing; {REMEDY}")
    if left := sorted(file.name for file in files - wanted.keys()):
        log.warning("%s does not name %s: not read", index, ", ".join(left))
    return wanted


def _read_file(file: Path, wanted: set[str] | None) -> dict[str, Tensor]:
    try:
        with safe_open(file, framework="pt") as shard:
            there = set(shard.keys())
            wanted = there if wanted is None else wanted
            if missing := sorted(wanted - there):
                raise InputError(f"{file}: {missing[0]!r} is missing, {INDEX} names it; {REMEDY}")
            if left := sorted(there - wanted):
                log.warning("%s: %s does not name %s: not read", file, INDEX, ", ".join(left))
            return {name: shard.get_tensor(name) for name in sorted(wanted)}
    except OSError as error:
        raise InputError(f"{file}: cannot be read ({first_line(error)})") from error
    except SafetensorError as error:
        raise InputError(f"{file}: corrupt safetensors file ({error})") from error


def _weight(folder: Path, name: str, q: Tensor | None, scale: Tensor | None) -> Tensor:
    """A matrix of int8 rows. Raises InputError for rows or scales that do not fit."""
    if q is not None and scale is not None:
        fit = q.dtype == torch.int8 and q.ndim == 2 and scale.shape == q.shape[:1]
        if fit and scale.is_floating_point() and scale.float().isfinite().all():
            return restore_int8(q, scale)
    found = f"{name} is {_form(q)}, {name}{SCALE} {_form(scale)}"
    expected = "expected int8 rows and a finite scale for each"
    raise InputError(f"head {folder}: {found}: {expected}; {REMEDY}")


def _form(tensor: Tensor | None) -> str:
    if tensor is None:
        return "missing"
    return f"{tensor.dtype} {list(tensor.shape)}".removeprefix("torch.")


def _our_name(name: str) -> str:
    return name.removeprefix("model.").replace("midlayer.", "layers.0.", 1)


def state_dict_of(tensors: Mapping[str, Tensor], config: DrafterConfig) -> dict[str, Tensor]:
    """The tensors of a head as its drafter has them."""
    state = dict(tensors)
    state.pop("t2d", None)  # the inverse of d2t
    if "mask_hidden" in state:
        state["mask_hidden"] = state["mask_hidden"].flatten()
    if config.draft_vocab_size == config.transformer.vocab_size:
        state.setdefault("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
    return state
