"""Writing heads, in the dialects that `format.py` describes."""

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from safetensors.torch import save_file
from torch import Tensor

from peagle.methods.base import Dialect
from peagle.methods.keys import AUX_COUNT, CORRECTION, FLAGS, LAYER_IDS, PREFIX, digest
from peagle.methods.registry import method_of
from peagle.model.config import DrafterConfig
from peagle.model.drafter import Drafter
from peagle.model.int8 import SCALE, round_int8

ARCHITECTURES = {"llama": "LlamaForCausalLMEagle3", "qwen3": "Eagle3Qwen3ForCausalLM"}
# A repository of native heads needs no large-file storage; of an export one file is handier.
SHARD_SIZES: dict[Dialect, str] = {"native": "15MB", "vllm": "5GB", "speculators": "5GB"}


def save_drafter(
    drafter: Drafter,
    folder: str | Path,
    dialect: Dialect = "native",
    dtype: torch.dtype | None = torch.bfloat16,
) -> None:
    """Write a head: to a temporary folder first, then renamed over `folder`. A link to the folder
    stays.

    `vllm` and `speculators` need the embedding table: share the target's before exporting. Their
    tools do not read `torch.int8`: matrices as int8 rows with scales, all else in bfloat16.
    """
    config = drafter.config
    folder = Path(folder).resolve()
    dtype = dtype or drafter.norm.weight.dtype
    assert dialect == "native" or dtype != torch.int8, "int8 is for the native dialect only"
    tensors = _as_stored(_tensors_to_write(drafter, dialect), dtype)
    raw = _keys(config, dialect, str(dtype).removeprefix("torch."))
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    try:
        head = {name: t for name, t in tensors.items() if not name.startswith(PREFIX)}
        save_torch_state_dict(head, made, max_shard_size=SHARD_SIZES[dialect])
        if config.correction is not None:
            _write_correction(made, config, tensors)
        _write_json(made, raw)
        if (folder / "README.md").is_file():  # a model card written by hand stays
            shutil.copy2(folder / "README.md", made)
        for file in (made, *made.rglob("*")):  # safetensors and mkdtemp are private by default
            file.chmod(0o755 if file.is_dir() else 0o644)
        replace_folder(made, folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def replace_folder(made: Path, folder: Path) -> None:
    """Replace `folder` by `made`: a kill in between leaves the old one as .NAME-old."""
    old = folder.with_name(f".{folder.name}-old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        os.replace(folder, old)
    os.replace(made, folder)
    shutil.rmtree(old, ignore_errors=True)


def _write_correction(folder: Path, config: DrafterConfig, tensors: Mapping[str, Tensor]) -> None:
    """Write the correction's tensors among a drafter's `tensors` into the head's folder."""
    chosen = {name.removeprefix(PREFIX): t for name, t in tensors.items() if PREFIX in name}
    dtype = str(chosen["token.weight"].dtype).removeprefix("torch.")
    keys = {"depths": config.depths, "dtype": dtype, "head": digest(tensors)}
    made = folder / CORRECTION
    made.mkdir()
    save_file(chosen, made / "model.safetensors", {"format": "pt"})
    _write_json(made, asdict(config)[CORRECTION] | keys)


def _write_json(folder: Path, keys: dict[str, Any]) -> None:
    """Write config.json."""
    (folder / "config.json").write_text(json.dumps(keys, indent=2, sort_keys=True) + "\n")


def _tensors_to_write(drafter: Drafter, dialect: Dialect) -> dict[str, Tensor]:
    config = drafter.config
    tensors = {name: t.detach().cpu() for name, t in drafter.state_dict().items()}
    t2d = torch.zeros(config.transformer.vocab_size, dtype=torch.bool)
    t2d[drafter.target_ids.cpu()] = True
    tensors["t2d"] = t2d
    if t2d.all():  # vLLM 0.30 and newer end on d2t
        del tensors["d2t"], tensors["t2d"]
    if "mask_hidden" in tensors:
        tensors["mask_hidden"] = tensors["mask_hidden"].view(1, 1, -1)
    if dialect != "native" and config.embedding == "mask-row":
        assert drafter.shared_embedding is not None, "share the target's embedding before exporting"
        row = tensors.pop("mask_embedding")
        table = drafter.shared_embedding.detach().to("cpu", row.dtype).clone()
        table[config.mask_token_id] = row
        tensors["embed_tokens.weight"] = table
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def _as_stored(tensors: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    stored = dict(tensors)
    for name, tensor in tensors.items():
        if dtype == torch.int8 and tensor.is_floating_point() and tensor.ndim == 2:
            stored[name], stored[name + SCALE] = round_int8(tensor, torch.bfloat16)
        elif tensor.is_floating_point():
            stored[name] = tensor.to(torch.bfloat16 if dtype == torch.int8 else dtype)
    return stored


def _keys(config: DrafterConfig, dialect: Dialect, dtype: str) -> dict[str, Any]:
    """config.json of a head. Raises InputError where a dialect would be misread by vLLM."""
    exported = config.embedding if dialect == "native" or config.embedding == "shared" else "full"
    common = {
        LAYER_IDS: list(config.feature_layers),
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        **{flag: getattr(config, flag) for flag in FLAGS},
        "peagle": {
            "method": config.method,
            "depths": config.depths,
            "embedding": exported,
            "d2t": config.draft_vocab_size < config.transformer.vocab_size,  # whether it is stored
            "provenance": asdict(config.provenance),
        },
        **method_of(config).export(config, dialect),
    }
    sizes = config.transformer.to_json() | {"dtype": dtype}
    if config.logit_scale != 1.0:
        sizes["logit_scale"] = config.logit_scale
    # Readers with transformers 4 know these two, and take a base of 10,000 where they are missing.
    rope = dict(sizes["rope_parameters"])
    sizes["rope_theta"] = rope.pop("rope_theta", 10_000.0)
    sizes["rope_scaling"] = None if rope.get("rope_type") == "default" else rope or None
    if dialect == "speculators":
        layers = {**sizes, AUX_COUNT: len(config.feature_layers)}
        return {**common, "transformer_layer_config": layers}
    return {
        **sizes,
        **common,
        "architectures": [ARCHITECTURES[config.transformer.model_type]],
        # vLLM's Llama drafter counts this list, its newer runner reads the top-level one.
        "eagle_config": {"use_aux_hidden_state": True, LAYER_IDS: common[LAYER_IDS]},
    }


def with_provenance(drafter: Drafter, **changes: Any) -> None:
    """Record more of where the head comes from (measured acceptance, data)."""
    known = drafter.config
    drafter.config = replace(known, provenance=replace(known.provenance, **changes))
