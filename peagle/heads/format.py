"""Heads on disk. Two dialects are read and written (`save.py`): vLLM/AWS (native as well) and
speculators.

The native one is the vLLM/AWS dialect, where a head that trained only the mask token's embedding
stores that one row as `mask_embedding` (vLLM wants the whole table: `peagle export` makes it), plus
a `peagle` block in config.json with what the head was trained against. It may hold matrices as int8
rows `NAME` (O, I) with a scale each, `NAME_scale` (O,), and then has "dtype" int8; they are read as
float32 (`model/int8.py`).
"""

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from peagle.catalog_fields import is_hub_id
from peagle.errors import InputError, first_line
from peagle.methods import keys
from peagle.methods.registry import METHODS
from peagle.model.config import CorrectionConfig, DrafterConfig, Provenance, default_feature_layers
from peagle.model.describe import INDEX
from peagle.model.int8 import SCALE, restore_int8
from peagle.model.layer_config import LayerConfig
from peagle.model.loader import download

log = logging.getLogger(__name__)

FILES = ["*.json", "*.safetensors"]  # of folders, too
FORMS = "give a folder or a hub id (owner/name[@revision])"
FETCH_AGAIN = "download or export the head again, config.json and tensors together"


@dataclass(frozen=True, slots=True)
class HeadKeys:
    """config.json of a head as it is, however damaged."""

    place: Path | str  # its folder, or its location elsewhere
    raw: dict[str, Any]  # with that of a correction under keys.CORRECTION

    @property
    def speculators(self) -> bool:
        return keys.SPECULATORS in self.raw

    @property
    def sizes(self) -> dict[str, Any]:
        """Sizes of the drafter's layers."""
        return dict(self.raw["transformer_layer_config"]) if self.speculators else self.raw

    @property
    def eagle(self) -> dict[str, Any]:
        """vLLM's block for EAGLE heads."""
        return self.raw.get("eagle_config") or {}

    @property
    def native(self) -> dict[str, Any]:
        """peagle's own block; empty for heads made elsewhere."""
        return self.raw.get("peagle") or {}

    @property
    def trained(self) -> Provenance:
        with self.naming():
            return Provenance(**self.native.get("provenance", {}))

    @property
    def target_width(self) -> int:
        return int(self.raw.get("target_hidden_size") or self.sizes["hidden_size"])

    @property
    def method(self) -> str:
        """Name of the head's method: the recorded one, or the first that claims its keys. Raises
        InputError for keys of another method."""
        claiming = [name for name, method in METHODS.items() if method.claims(self.raw)]
        recognised = claiming[0] if claiming else self.raw.get(keys.SPECULATORS)
        with self.naming():
            named = str(self.native.get("method", recognised))
        if named in claiming:
            return named
        why = f"{named!r} is no method: known are {', '.join(METHODS)}"
        if named in METHODS:
            why = f"peagle.method is {named!r}, the other keys are those of {recognised}"
        raise damaged(self.place, f"config.json: {why}")

    @property
    def depths(self) -> int | None:
        """Draft tokens that the head was trained for; None: unknown."""
        with self.naming():
            methods = (self.raw.get("speculators_config") or {}).get("proposal_methods") or [{}]
            tokens = self.native.get("depths", methods[0].get("speculative_tokens"))
            return None if tokens is None else int(tokens)

    @property
    def layers(self) -> list[int]:
        """The feature layers that it names; empty where they are vLLM's default."""
        return list(self.raw.get(keys.LAYER_IDS) or self.eagle.get(keys.LAYER_IDS) or [])

    @property
    def counted_layers(self) -> int:
        """The number of feature layers by which vLLM sizes `fc`. With Qwen3's layers it counts the
        ids at the top, too (vllm 0.32.0, qwen3_eagle3.py)."""
        qwen3 = self.sizes.get("model_type") == "qwen3"
        ids = self.layers if qwen3 else self.eagle.get(keys.LAYER_IDS)
        return self.sizes.get(keys.AUX_COUNT) or len(ids or ()) or 3

    @property
    def flags(self) -> dict[str, bool]:
        """Its keys.FLAGS, as vLLM reads them."""
        theirs = self.speculators and not METHODS[self.method].parallel
        defaults = {"norm_before_residual": theirs}  # speculators' and vLLM's
        return {f: bool(self.eagle.get(f, self.raw.get(f, defaults.get(f)))) for f in keys.FLAGS}

    @property
    def correction(self) -> CorrectionConfig | None:
        raw = self.raw.get(keys.CORRECTION)
        return None if raw is None else CorrectionConfig(raw["rank"], raw["candidates"])

    @contextmanager
    def naming(self) -> Iterator[None]:
        """Errors of keys that are missing or of another type name the folder."""
        try:
            yield
        except InputError as error:
            if error.field == "head":
                raise
            raise damaged(self.place, f"config.json: {error}") from error
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            missing = "missing " if isinstance(error, KeyError) else ""
            raise damaged(self.place, f"config.json: {missing}{first_line(error)}") from error

    def parse(self, target_layers: int | None = None) -> DrafterConfig:
        """The drafter's configuration. Raises InputError for one that is damaged."""
        with self.naming():
            sizes = self.sizes
            layers = self.layers
            if not layers and target_layers is not None:
                layers = list(default_feature_layers(target_layers))
            return DrafterConfig(
                method=self.method,
                transformer=LayerConfig.from_json(sizes),
                feature_layers=tuple(layers),
                draft_vocab_size=self.raw.get("draft_vocab_size") or sizes["vocab_size"],
                target_hidden_size=self.target_width,
                mask_token_id=next(iter(keys.mask_ids(self.raw).values()), None),
                depths=self.depths,
                embedding=self.native.get("embedding", "full"),
                logit_scale=sizes.get("logit_scale", 1.0),
                correction=self.correction,
                provenance=self.trained,
                **self.flags,
            )


@dataclass(frozen=True, slots=True)
class HeadFiles(HeadKeys):
    """config.json and tensors of a head as they are, however damaged."""

    tensors: dict[str, Tensor]  # by native names, those of a correction included


def head_folder(name: str | Path, field: str = "head", wanted: list[str] = FILES) -> Path:
    """Folder of a head given as folder or hub id[@revision], of which the `wanted` files are
    downloaded into the hub's cache."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        below = folder / "head"  # of a training run
        if not (folder / "config.json").is_file():
            fix = f"did you mean {below}?" if (below / "config.json").is_file() else None
            raise InputError("no config.json", field=field, value=Path(name), fix=fix)
        return folder
    if not is_hub_id(str(name)):
        raise InputError("no such folder", field=field, value=Path(name), fix=FORMS)
    return download(str(name), wanted, field)


def damaged(place: Path | str, why: str) -> InputError:
    """The error about files of a head that are missing, damaged or contradict each other."""
    return InputError(why, field="head", value=place, fix=FETCH_AGAIN)


def read_head(folder: Path) -> HeadFiles:
    """The files of a head. Raises InputError for those that cannot be read."""
    return HeadFiles(folder, read_keys(folder).raw, read_tensors(folder))


def read_config(folder: Path, target_layers: int | None = None) -> DrafterConfig:
    """The drafter's configuration from either dialect's config.json."""
    return read_keys(folder).parse(target_layers)


def read_keys(folder: Path, place: Path | str | None = None) -> HeadKeys:
    """The config.json of a head and of its correction; errors name `place`. Raises InputError when
    one is missing or no JSON object."""
    raw = _read_object(folder, "config.json", place)
    if (folder / keys.CORRECTION).is_dir():
        raw[keys.CORRECTION] = _read_object(folder, f"{keys.CORRECTION}/config.json", place)
    return HeadKeys(place or folder, raw)


def _read_object(folder: Path, name: str, place: Path | str | None = None) -> dict[str, Any]:
    try:
        return dict(json.loads((folder / name).read_text()))
    except FileNotFoundError as error:
        raise damaged(place or folder, f"no {name}") from error
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise damaged(place or folder, f"{name} is no JSON object ({first_line(error)})") from error


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a head by native names, with those of its correction. Safetensors only.

    Raises InputError for files that are missing, damaged, or hold the same tensor.
    """
    tensors = _read_folder(folder)
    if (folder / keys.CORRECTION).is_dir():
        for name, tensor in _read_folder(folder / keys.CORRECTION).items():
            if keys.PREFIX + name in tensors:
                raise damaged(folder, f"{keys.PREFIX + name!r} is there and in {keys.CORRECTION}/")
            tensors[keys.PREFIX + name] = tensor
    return tensors


def _read_folder(folder: Path) -> dict[str, Tensor]:
    """Tensors of a folder. As in vLLM an index decides, and without one every file is read."""
    index = _index(folder)
    files = sorted(folder.glob("*.safetensors"))
    if not files and not index:
        raise damaged(folder, "no .safetensors file (pickles are not loaded)")
    tensors = dict[str, Tensor]()
    origins = dict[str, str]()  # of these tensors
    left = [file.name for file in files if index and file.name not in index.values()]
    for file in (file for file in files if file.name not in left):
        for stored, tensor in _read_file(file).items():
            name = stored.removeprefix("model.").replace("midlayer.", "layers.0.", 1)
            origin = f"{stored!r} of {file.name}"
            if index and index.get(stored) != file.name:
                left.append(origin)
                continue
            if name in tensors:
                raise damaged(folder, f"{origins[name]} and {origin} are the same tensor")
            tensors[name] = tensor
            origins[name] = origin
    wanted = [f"{stored!r} of {name}" for stored, name in index.items()]
    if missing := [origin for origin in wanted if origin not in origins.values()]:
        raise damaged(folder, f"{missing[0]} is missing, {INDEX} names it")
    if left:
        log.warning("%s does not name %s: not read", folder / INDEX, ", ".join(left))
    int8 = {name for name, tensor in tensors.items() if tensor.dtype == torch.int8}
    scaled = {name.removesuffix(SCALE) for name in tensors if name.endswith(SCALE)}
    for name in sorted(int8 | scaled):
        scales = tensors.pop(name + SCALE, None)
        tensors[name] = _restored(folder, name, tensors.get(name), scales)
    return tensors


def _index(folder: Path) -> dict[str, str]:
    """Names of files by the tensors that are wanted of them; empty without an index."""
    if not (folder / INDEX).is_file():
        return {}
    index = _read_object(folder, INDEX).get("weight_map")
    if not isinstance(index, dict) or not index:
        raise damaged(folder, f"{INDEX}: weight_map is not an object of tensors and files")
    for name in index.values():
        file = Path(str(name))
        if file.name != name or file.suffix != ".safetensors":
            raise damaged(folder, f"{INDEX}: {name!r} is no .safetensors file of this folder")
    return index


def _read_file(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except OSError as error:
        raise damaged(file.parent, f"{file.name} cannot be read ({first_line(error)})") from error
    except SafetensorError as error:
        why = f"{file.name} is a corrupt safetensors file ({error})"
        raise damaged(file.parent, why) from error


def _restored(folder: Path, name: str, rows: Tensor | None, scales: Tensor | None) -> Tensor:
    """A matrix of int8 rows. Raises InputError for rows or scales that do not fit."""
    if rows is not None and scales is not None:
        fit = rows.dtype == torch.int8 and rows.ndim == 2 and scales.shape == rows.shape[:1]
        if fit and scales.is_floating_point() and scales.float().isfinite().all():
            return restore_int8(rows, scales)
    found = f"{name} is {_form(rows)}, {name}{SCALE} {_form(scales)}"
    raise damaged(folder, f"{found}: expected int8 rows and a finite scale for each")


def _form(tensor: Tensor | None) -> str:
    return "missing" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"[6:]


def state_dict_of(tensors: Mapping[str, Tensor], config: DrafterConfig) -> dict[str, Tensor]:
    """The tensors of a head as its drafter has them."""
    state = dict(tensors)
    state.pop("t2d", None)  # the inverse of d2t
    if "mask_hidden" in state:
        state["mask_hidden"] = state["mask_hidden"].flatten()
    if config.draft_vocab_size == config.transformer.vocab_size:
        state.setdefault("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
    return state
