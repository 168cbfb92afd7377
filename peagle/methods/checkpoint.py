"""Heads on disk. Two dialects, read and written: vLLM/AWS (also ours) and speculators.

Ours is the vLLM/AWS dialect, where a head that trained only the mask token's embedding stores that
one row as `mask_embedding` (vLLM wants the whole table: `peagle export` makes it), plus a
`peagle` block in config.json with what the head was trained against.
"""

import json
import os
import shutil
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub import save_torch_state_dict, snapshot_download
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    StrictDataclassError,
)
from safetensors import SafetensorError, safe_open
from torch import Tensor

from peagle.errors import InputError, first_line
from peagle.model.config import (
    TRANSFORMERS,
    DrafterConfig,
    Method,
    Provenance,
    default_feature_layers,
)
from peagle.model.drafter import Drafter
from peagle.model.loader import quiet_hub
from peagle.model.target import Target

Dialect = Literal["native", "vllm", "speculators"]
# Where the mask id may be, in vLLM's order; first of all comes dflash_config.mask_token_id.
MASK_ID_KEYS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
ARCHITECTURES = {"llama": "LlamaForCausalLMEagle3", "qwen3": "Eagle3Qwen3ForCausalLM"}
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
REMEDY = "download or export the head again, config.json and tensors together"
SHARD_SIZE = "15MB"  # so that a repository of heads needs no large-file storage


def load_drafter(name: str | Path, target: Target, *, force: bool = False) -> Drafter:
    """Load the head in folder or hub repository `name` (either dialect), checked against `target`,
    in its dtype and on its device. `force` accepts another target of the same shape. Raises
    InputError naming the file, tensor or difference at fault.
    """
    folder = find_head(name)
    config = read_config(folder, len(target.layers))
    _check_fits(name, config, target, force=force)
    tensors = read_tensors(folder)
    ours = config.provenance != Provenance()
    if not ours and config.embedding == "full" and "embed_tokens.weight" not in tensors:
        config = replace(config, embedding="shared")  # as vLLM does; our own heads say it
    drafter = Drafter(config)
    _fill(drafter, tensors, folder)
    drafter = drafter.to(target.device, target.dtype).eval()
    drafter.share_embedding(target.embedding)
    return drafter


def find_head(name: str | Path) -> Path:
    """Folder of a head given as folder or hub id[@revision] (downloaded into the hub's cache)."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    hub_id, _, revision = str(name).partition("@")
    if str(name).startswith((".", "/", "~")) or hub_id.count("/") != 1:
        raise InputError(
            f"head {name}: no such folder (give a folder or a hub id owner/name[@revision])"
        )
    try:
        wanted = ["*.json", "*.safetensors"]
        with quiet_hub():
            return Path(snapshot_download(hub_id, revision=revision or None, allow_patterns=wanted))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise InputError(
            f"head {name}: neither a folder nor a reachable hub repository ({first_line(error)})"
        ) from error


def read_config(folder: Path, target_layers: int | None = None) -> DrafterConfig:
    """The drafter's configuration from either dialect's config.json."""
    file = folder / "config.json"
    if not file.is_file():
        raise InputError(f"head {folder}: no config.json")
    try:
        raw = dict(json.loads(file.read_text()))
    except (ValueError, TypeError, RecursionError) as error:
        raise InputError(f"{file}: not a JSON object ({first_line(error)})") from error
    try:
        return _parse(raw, target_layers)
    except KeyError as error:
        raise InputError(f"{file}: missing {error.args[0]!r}") from error
    except (ValueError, TypeError, AttributeError, StrictDataclassError) as error:
        raise InputError(f"{file}: {first_line(error)}") from error


def _parse(raw: dict[str, Any], target_layers: int | None) -> DrafterConfig:
    speculators = "speculators_model_type" in raw
    sizes = dict(raw["transformer_layer_config"]) if speculators else dict(raw)
    kind = sizes.get("model_type", "llama")
    if kind not in TRANSFORMERS:
        raise InputError(f"model_type {kind!r}: heads have llama or qwen3 layers")
    eagle = raw.get("eagle_config") or {}
    layers = raw.get(LAYER_IDS) or eagle.get(LAYER_IDS)
    if not layers and target_layers is not None:
        layers = default_feature_layers(target_layers)
    masks = [(raw.get("dflash_config") or {}).get("mask_token_id"), *map(raw.get, MASK_ID_KEYS)]
    mask = next((token for token in masks if token is not None), None)
    ours = raw.get("peagle") or {}
    if speculators:
        method = _speculators_method(raw["speculators_model_type"])
        proposal = raw.get("speculators_config", {}).get("proposal_methods") or [{}]
        ours.setdefault("depths", proposal[0].get("speculative_tokens", 8))
    else:
        method = "p-eagle" if mask is not None else "eagle3"
    flags = {flag: bool(eagle.get(flag, raw.get(flag, False))) for flag in FLAGS}
    if speculators and method == "eagle3" and "norm_before_residual" not in raw:
        flags["norm_before_residual"] = True  # what speculators and vLLM take when it is absent
    return DrafterConfig(
        method=method,
        transformer=TRANSFORMERS[kind].from_dict(_without_ours(sizes)),
        feature_layers=tuple(layers or ()),
        draft_vocab_size=raw.get("draft_vocab_size") or sizes["vocab_size"],
        target_hidden_size=raw.get("target_hidden_size") or sizes["hidden_size"],
        mask_token_id=mask,
        depths=ours.get("depths", 8),
        embedding=ours.get("embedding", "full"),
        logit_scale=sizes.get("logit_scale", 1.0),
        provenance=Provenance(**ours.get("provenance", {})),
        **flags,
    )


def _speculators_method(kind: str) -> Method:
    if kind == "peagle":
        return "p-eagle"
    if kind == "eagle3":
        return "eagle3"
    raise InputError(f"speculators_model_type {kind!r}: expected peagle or eagle3")


def _without_ours(sizes: dict[str, Any]) -> dict[str, Any]:
    """Keys of a Llama or Qwen3 config: the others are read into DrafterConfig, or not ours."""
    foreign = {
        "architectures", "eagle_config", LAYER_IDS, "draft_vocab_size", "peagle", "dflash_config",
        "target_hidden_size", "logit_scale", "parallel_drafting", "dtype", "torch_dtype",
        "transformers_version", *MASK_ID_KEYS, *FLAGS,
    }  # fmt: skip
    return {key: value for key, value in sizes.items() if key not in foreign}


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a head by our names. Safetensors only."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise InputError(f"head {folder}: no .safetensors file (pickles are not loaded)")
    tensors = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as shard:
                names = shard.keys()
                tensors.update({_our_name(name): shard.get_tensor(name) for name in names})
        except SafetensorError as error:
            raise InputError(f"{file}: corrupt safetensors file ({error})") from error
    return tensors


def _our_name(name: str) -> str:
    return name.removeprefix("model.").replace("midlayer.", "layers.0.", 1)


def _fill(drafter: Drafter, tensors: dict[str, Tensor], folder: Path) -> None:
    """Load tensors into the drafter, naming what is missing, unknown or of the wrong shape."""
    config = drafter.config
    tensors.pop("t2d", None)  # the inverse of d2t
    if config.embedding == "full" and "embed_tokens.weight" not in tensors:
        raise _tensor_error(folder, "missing", "embed_tokens.weight")
    if "mask_hidden" in tensors:
        tensors["mask_hidden"] = tensors["mask_hidden"].flatten()
    if config.draft_vocab_size == config.transformer.vocab_size:
        tensors.setdefault("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
    wanted = drafter.state_dict()
    for name, tensor in wanted.items():
        if name not in tensors:
            raise _tensor_error(folder, "missing", name)
        if tensors[name].shape != tensor.shape:
            found = f"{list(tensors[name].shape)}, expected {list(tensor.shape)}"
            raise InputError(f"head {folder}: tensor {name!r} has shape {found}; {REMEDY}")
    if unknown := sorted(set(tensors) - set(wanted)):
        raise _tensor_error(folder, "unknown", unknown[0])
    drafter.load_state_dict(tensors)


def _tensor_error(folder: Path, what: str, name: str) -> InputError:
    return InputError(f"head {folder}: {what} tensor {name!r}; {REMEDY}")


def _check_fits(name: str | Path, config: DrafterConfig, target: Target, *, force: bool) -> None:
    """Refuse a head for another target. Sizes always; hashes unless `force`."""
    facts = [
        ("target hidden size", config.target_hidden_size, target.config.hidden_size),
        ("vocabulary", config.transformer.vocab_size, target.embedding.shape[0]),
    ]
    known, sizes = config.provenance, len(facts)
    if not force:
        facts += [
            ("config hash", known.config_hash or None, target.config_hash()),
            ("weights hash", known.weights_hash or None, target.weights_hash()),
            ("chat template hash", known.template_hash or None, target.template_hash()),
        ]
    for index, (what, trained, found) in enumerate(facts):
        if trained is not None and trained != found:
            origin = f" ({known.target})" if known.target else ""
            hint = "" if index < sizes else "; for a fine-tune of the same base model use --force"
            if what == "chat template hash":
                hint = "; name its template with --chat-template, or use --force"
            raise InputError(
                f"head {name} was trained for another target{origin}: its {what} is {trained}, "
                f"that of {target.name} is {found}{hint}"
            )


def save_drafter(
    drafter: Drafter,
    folder: str | Path,
    dialect: Dialect = "native",
    dtype: torch.dtype | None = torch.bfloat16,
) -> None:
    """Write a head: to a temporary folder first, then renamed over `folder`.

    `vllm` and `speculators` need the embedding table: share the target's before exporting.
    """
    config, folder = drafter.config, Path(folder)
    dtype = dtype or drafter.norm.weight.dtype
    tensors = _tensors_to_write(drafter, dialect, dtype)
    raw = config_to_json(config, dialect, str(dtype).removeprefix("torch."))
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    try:
        save_torch_state_dict(tensors, made, max_shard_size=SHARD_SIZE)
        (made / "config.json").write_text(json.dumps(raw, indent=2, sort_keys=True) + "\n")
        if (folder / "README.md").is_file():  # a model card written by hand stays
            shutil.copy2(folder / "README.md", made)
        made.chmod(0o755)
        for file in made.iterdir():  # safetensors and mkdtemp are private by default
            file.chmod(0o644)
        replace_folder(made, folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def replace_folder(made: Path, folder: Path) -> None:
    """Put `made` in the place of `folder`: a kill in between leaves the old one beside it."""
    old = folder.with_name(f".{folder.name}-old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        os.replace(folder, old)
    os.replace(made, folder)
    shutil.rmtree(old, ignore_errors=True)


def _tensors_to_write(drafter: Drafter, dialect: Dialect, dtype: torch.dtype) -> dict[str, Tensor]:
    config = drafter.config
    tensors = {
        name: t.detach().to("cpu", dtype) if t.is_floating_point() else t.detach().cpu()
        for name, t in drafter.state_dict().items()
    }
    t2d = torch.zeros(config.transformer.vocab_size, dtype=torch.bool)
    t2d[drafter.target_ids.cpu()] = True
    tensors["t2d"] = t2d
    if "mask_hidden" in tensors:
        tensors["mask_hidden"] = tensors["mask_hidden"].view(1, 1, -1)
    if dialect != "native" and config.embedding == "mask-row":
        assert drafter.shared_embedding is not None, "share the target's embedding before exporting"
        row = tensors.pop("mask_embedding")
        table = drafter.shared_embedding.detach().to("cpu", row.dtype).clone()
        table[config.mask_token_id] = row
        tensors["embed_tokens.weight"] = table
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def config_to_json(config: DrafterConfig, dialect: Dialect, dtype: str) -> dict[str, Any]:
    """config.json of a head. Raises InputError where a dialect would be misread by vLLM."""
    exported = config.embedding if dialect == "native" or config.embedding == "shared" else "full"
    flags = {flag: getattr(config, flag) for flag in FLAGS}
    common = {
        LAYER_IDS: list(config.feature_layers),
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        **flags,
        "peagle": {
            "depths": config.depths,
            "embedding": exported,
            "provenance": asdict(config.provenance),
        },
    }
    sizes = config.transformer.to_dict()
    for key in ("dtype", "architectures", "transformers_version"):
        sizes.pop(key, None)
    if config.logit_scale != 1.0:
        sizes["logit_scale"] = config.logit_scale
    if dialect == "speculators":
        if config.fc_norm and config.method == "p-eagle":
            raise InputError(
                "vLLM drops fc_norm for speculators' peagle heads: export --to vllm instead"
            )
        sizes["dtype"] = dtype
        return {**common, **_speculators_keys(config), "transformer_layer_config": sizes}
    parallel = {"ptd_token_id": config.mask_token_id, "parallel_drafting": True}
    return {
        **sizes,
        **common,
        **(parallel if config.method == "p-eagle" else {}),
        "dtype": dtype,
        "architectures": [ARCHITECTURES[config.transformer.model_type]],
        # vLLM's Llama drafter counts this list, its newer runner reads the top-level one.
        "eagle_config": {
            "use_aux_hidden_state": True,
            LAYER_IDS: list(config.feature_layers),
            "norm_before_fc": config.norm_before_fc,
        },
    }


def _speculators_keys(config: DrafterConfig) -> dict[str, Any]:
    kind = "peagle" if config.method == "p-eagle" else "eagle3"
    keys: dict[str, Any] = {
        "architectures": ["PEagleSpeculator" if kind == "peagle" else "Eagle3Speculator"],
        "speculators_model_type": kind,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": config.depths}],
            "verifier": {"name_or_path": config.provenance.target, "architectures": []},
        },
    }
    return keys | ({"mask_token_id": config.mask_token_id} if kind == "peagle" else {})


def with_provenance(drafter: Drafter, **changes: Any) -> None:
    """Record more of where the head comes from (measured acceptance, data)."""
    provenance = replace(drafter.config.provenance, **changes)
    drafter.config = replace(drafter.config, provenance=provenance)
