"""Kinds of damage to a saved head, each with the check that names it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from peagle.methods.keys import LAYER_IDS

MASK, TABLE = 3, "embed_tokens.weight"
NESTED = f"eagle_config__{LAYER_IDS}"
KNOWN = "peagle__provenance__"
Damage = Callable[[Path], object]
Tensors = dict[str, Tensor]


def change(**keys: Any) -> Damage:
    """Set keys of config.json; a.b is written a__b, None removes."""

    def damage(head: Path) -> None:
        raw = json.loads((head / "config.json").read_text())
        for name, value in keys.items():
            *path, last = name.split("__")
            inner = raw
            for part in path:
                inner = inner[part]
            inner[last] = value
            if value is None:
                del inner[last]
        (head / "config.json").write_text(json.dumps(raw))

    return damage


def layers(ids: list[int]) -> Damage:
    return change(**{LAYER_IDS: ids, NESTED: ids})


def forgotten(top: list[Any] | None, nested: list[Any] | None) -> Damage:
    """Layer ids of a head that does not record with which it was trained."""
    return change(**{LAYER_IDS: top, NESTED: nested, KNOWN + "feature_layers": []})


def tensors(edit: Callable[[Tensors], object]) -> Damage:
    def damage(head: Path) -> None:
        found = load_file(head / "model.safetensors")
        edit(found)
        save_file(found, head / "model.safetensors")

    return damage


def put(name: str, value: Callable[[Tensor], Tensor]) -> Damage:
    return tensors(lambda found: found.update({name: value(found[name]).contiguous()}))


def drop(name: str) -> Damage:
    return tensors(lambda found: found.pop(name))


def truncated(head: Path) -> None:
    file = head / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100])


def two_layers(head: Path) -> None:
    """In all but the list whose length vLLM counts."""
    forgotten([2, 6], None)(head)
    put("fc.weight", lambda weight: weight[:, :64])(head)


ROW, HIDDEN = "mask_embedding", "mask_hidden"
DAMAGES: list[tuple[str, str, Damage]] = [
    ("files", "corrupt safetensors", truncated),
    ("files", "no .safetensors file", lambda head: (head / "model.safetensors").unlink()),
    ("files", "no JSON object", lambda head: (head / "config.json").write_text("[1")),
    ("sizes", "malformed", change(vocab_size=None)),
    ("sizes", "vocab_size is 100, the target's is 128", change(vocab_size=100)),
    ("sizes", "target_hidden_size is 48", change(target_hidden_size=48)),
    ("sizes", "draft_vocab_size is 90, lm_head has 96 rows", change(draft_vocab_size=90)),
    ("provenance", "trained for tiny-0: config hash 0", change(**{KNOWN + "config_hash": "0"})),
    ("provenance", "weights hash 0", change(**{KNOWN + "weights_hash": "0"})),
    ("chat template", "trained with chat template 0", change(**{KNOWN + "template_hash": "0"})),
    ("feature layers", "[0, 2, 5]; the head was trained with [0, 2, 6]", layers([0, 2, 5])),
    ("feature layers", "[0, 2]; the head was trained with", layers([0, 2])),
    ("feature layers", "[0, 3, 6]; the head was trained with", change(**{LAYER_IDS: [0, 3, 6]})),
    ("feature layers", "in eagle_config [0, 2, 5]", change(**{NESTED: [0, 2, 5]})),
    ("feature layers", "in eagle_config only: vLLM would tap", change(**{LAYER_IDS: None})),
    ("feature layers", "vLLM would count 3", two_layers),
    ("feature layers", "not strictly ascending", forgotten([2, 0, 6], [2, 0, 6])),
    ("feature layers", "the target has layers 0 to 6", forgotten([0, 2, 8], [0, 2, 8])),
    ("feature layers", "fc reads 96 features, [0, 2] are 2 layers", forgotten([0, 2], [0, 2])),
    ("feature layers", "malformed", forgotten(["0", 2, 6], ["0", 2, 6])),
    ("mask token", "outside the vocabulary", change(ptd_token_id=128)),
    ("mask token", "is an ordinary token", change(ptd_token_id=40)),
    ("mask token", "pad, bos, eos", change(ptd_token_id=0)),
    ("mask token", "chat template", change(ptd_token_id=2)),
    ("mask token", "mask_token_id 4, ptd_token_id 3 differ", change(mask_token_id=4)),
    ("mask token", "names no mask token", change(ptd_token_id=None)),
    ("tensors", "mask_hidden is missing", drop(HIDDEN)),
    ("tensors", "mask_embedding is missing", drop(ROW)),
    ("loading", "'mask_embedding' holds NaN", put(ROW, lambda row: row * float("nan"))),
    ("tensors", "unknown tensors ['mask_embedding']", change(peagle__embedding="shared")),
    ("tensors", f"{TABLE} is missing", change(peagle__embedding="full")),
    ("draft vocabulary", "not ascending at draft ids [5]",
     put("d2t", lambda d: d - (torch.arange(96) == 5).long())),
    ("draft vocabulary", "leads to target ids", put("d2t", lambda d: d + 1)),
    ("tensors", "d2t has shape [95], not [96]", put("d2t", lambda d: d[:95])),
    ("tensors", "d2t is missing", drop("d2t")),
    ("draft vocabulary", "t2d marks 95 tokens",
     put("t2d", lambda t: t & (torch.arange(128) != 50))),
    ("tensors", "norm.weight is missing", drop("norm.weight")),
    ("tensors", "layers.1.mlp.up_proj.weight has shape [47, 32], not [48, 32]",
     put("layers.1.mlp.up_proj.weight", lambda w: w[1:])),
    ("tensors", "unknown tensors ['extra']", tensors(lambda t: t.update(extra=torch.zeros(1)))),
    ("keys", "final_logit_softcapping 30.0: it changes what", change(final_logit_softcapping=30.0)),
    ("keys", "attn_sinks 'on'", change(eagle_config__attn_sinks="on")),
    ("keys", "use_sliding_window is true", change(use_sliding_window=True)),
    ("keys", "layer_types has ['full_attention', 'sliding_attention']",
     change(layer_types=["full_attention", "sliding_attention"], sliding_window=9)),
    ("keys", "layer_types has ['chunked_attention']", change(layer_types=["chunked_attention"])),
    ("tensors", "sliding_window 0: must be",
     change(layer_types=["sliding_attention"], sliding_window=0)),
    ("keys", "use_aux_hidden_state is false", change(eagle_config__use_aux_hidden_state=False)),
    ("tensors", "input_norm.weight is missing",
     change(norm_before_fc=True, eagle_config__norm_before_fc=True)),
    ("loading", "'fc.weight' holds NaN", put("fc.weight", lambda w: w / 0)),
    ("tensors", "model_type 'gemma': unknown", change(model_type="gemma")),
]  # fmt: skip
TABLES: list[tuple[str, str, Damage]] = [
    ("embedding", "unrelated to the target's", put(TABLE, torch.randn_like)),
    ("embedding", "unrelated to the target's", put(TABLE, lambda table: table.roll(1, 0))),
    ("tensors", f"{TABLE} has shape [127, 32], not [128, 32]",
     put(TABLE, lambda table: table[:-1])),
    ("tensors", "mask_embedding is missing", change(peagle__embedding="mask-row")),
]  # fmt: skip
