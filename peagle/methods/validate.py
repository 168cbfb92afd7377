"""A head on disk beside its target: what can be checked without running either.

Each check returns what it found, or raises `Differs` (what is wrong, and the fix) or `Skipped`.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from peagle.errors import InputError, first_line
from peagle.methods.checkpoint import LAYER_IDS, MASK_ID_KEYS, REMEDY, read_tensors
from peagle.model.config import Provenance, default_feature_layers
from peagle.model.target import Target
from peagle.model.vocab import check_mask_token

TABLE, ROW = "embed_tokens.weight", "mask_embedding"
SAMPLE = 512  # rows of an embedding table that are compared
RELATED = 0.1  # a row is nearer than this (cosine) to its counterpart than to another row


class Differs(Exception):
    """A check failed."""

    def __init__(self, found: str, fix: str) -> None:
        super().__init__(found)
        self.found, self.fix = found, fix


class Skipped(Exception):
    """A check does not apply; the text says why."""


@dataclass(frozen=True, slots=True)
class HeadFiles:
    """config.json and tensors as they are, however damaged."""

    raw: dict[str, Any]
    tensors: dict[str, Tensor]

    @property
    def speculators(self) -> bool:
        return "speculators_model_type" in self.raw

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

    @property
    def mask_ids(self) -> dict[str, int]:
        """The mask token id by each name it has in config.json, in vLLM's order."""
        nested = (self.raw.get("dflash_config") or {}).get("mask_token_id")
        named = {"dflash_config.mask_token_id": nested}
        named |= {key: self.raw.get(key) for key in MASK_ID_KEYS}
        return {key: token for key, token in named.items() if token is not None}


def read_head(folder: Path) -> HeadFiles:
    """The files of a head. Raises InputError for those that cannot be read."""
    file = folder / "config.json"
    try:
        raw = dict(json.loads(file.read_text()))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise InputError(f"{file}: not a JSON object ({first_line(error)}); {REMEDY}") from error
    return HeadFiles(raw, read_tensors(folder))


def sizes(head: HeadFiles, target: Target) -> str:
    """Target hidden size and vocabulary; the draft vocabulary and the rows of `lm_head`."""
    vocab = head.sizes["vocab_size"]
    wanted = target.config.hidden_size, target.embedding.shape[0]
    for name, said, found in zip(
        ("target_hidden_size", "vocab_size"), (head.target_width, vocab), wanted, strict=True
    ):
        if said != found:
            why = f"{name} is {said}, the target's is {found}"
            raise Differs(why, "the head is for another target: name that one")
    draft = head.raw.get("draft_vocab_size") or vocab
    rows = len(head.tensors["lm_head.weight"]) if "lm_head.weight" in head.tensors else draft
    if not 1 <= draft <= vocab or rows != draft:
        raise Differs(
            f"draft_vocab_size is {draft}, lm_head has {rows} rows, the target {vocab} tokens",
            f"set draft_vocab_size to the rows of lm_head, or {REMEDY}",
        )
    return f"hidden size {wanted[0]}, vocabulary {vocab}, {draft} drafted"


def provenance(head: HeadFiles, target: Target) -> str:
    """The target it was trained for, by fingerprints of its architecture and weights."""
    known = head.trained
    if not known.config_hash and not known.weights_hash:
        raise Skipped("the head does not record its target")
    facts = {
        "config hash": (known.config_hash, target.config_hash()),
        "weights hash": (known.weights_hash, target.weights_hash()),
    }
    for name, (said, found) in facts.items():
        if said and said != found:
            raise Differs(
                f"trained for {known.target or 'another target'}: {name} {said}, here {found}",
                "name that target; for a fine-tune of the same base use --force, or train the head "
                "on its answers (peagle train --init-from)",
            )
    return f"trained for {known.target or 'this target'}: hashes agree"


def template(head: HeadFiles, target: Target) -> str:
    """The chat template the training data was made with."""
    said, found = head.trained.template_hash, target.template_hash()
    if not said:
        raise Skipped("the head does not record one")
    if said != found:
        raise Differs(
            f"trained with chat template {said}, the target's is {found or 'absent'}",
            "name the template it was trained with (--chat-template); --force accepts another",
        )
    return f"hash {said} agrees"


def feature_layers(head: HeadFiles, target: Target) -> str:
    """Ids of the tapped layers: in both places vLLM reads, valid, as wide as `fc`, as trained."""
    count = len(target.layers)
    defaults = list(default_feature_layers(count))
    top, nested = head.raw.get(LAYER_IDS), (head.raw.get("eagle_config") or {}).get(LAYER_IDS)
    ids = top or nested or defaults
    trained = head.trained.feature_layers
    rewrite = f"write {trained or 'the layers it was trained with'} as {LAYER_IDS} in config.json"
    if not head.speculators:
        rewrite += ", also in eagle_config"
    if trained and trained != ids:
        raise Differs(f"{ids}; the head was trained with {trained}", rewrite)
    if not head.speculators:  # vLLM reads both places: the values at the top, the count below
        if nested and nested != ids:
            raise Differs(f"{LAYER_IDS} is {ids}, in eagle_config {nested}", rewrite)
        if not top and ids != defaults:
            why = f"{LAYER_IDS} is {ids} in eagle_config only: vLLM would tap {defaults}"
            raise Differs(why, rewrite)
        if not nested and len(ids) != len(defaults):
            why = f"{ids} is not in eagle_config: vLLM would count {len(defaults)}"
            raise Differs(why, rewrite)
    if any(a >= b for a, b in zip(ids, ids[1:], strict=False)):
        raise Differs(f"{ids} is not strictly ascending; vLLM sorts and de-duplicates it", rewrite)
    if not 0 <= ids[0] <= ids[-1] < count:
        raise Differs(f"{ids}: the target has layers 0 to {count - 1}", rewrite)
    width = head.tensors["fc.weight"].shape[1] if "fc.weight" in head.tensors else None
    if width not in (None, len(ids) * head.target_width):
        many = f"{len(ids)} layers of {head.target_width}"
        raise Differs(f"fc reads {width} features, {ids} are {many}", rewrite)
    return f"{ids} of {count}, as wide as fc"


def mask_token(head: HeadFiles, target: Target) -> str:
    """The placeholder of P-EAGLE: one id that text never produces, its row and its feature."""
    ids, tensors = head.mask_ids, head.tensors
    if not ids and not {ROW, "mask_hidden"} & tensors.keys():
        raise Skipped("an eagle3 head has none")
    if not ids:
        raise Differs("config.json names no mask token id", "write it as ptd_token_id")
    token = next(iter(ids.values()))
    said = ", ".join(f"{key} {value}" for key, value in ids.items())
    if len(set(ids.values())) > 1:
        raise Differs(f"{said} differ", "keep the one the head was trained with")
    vocab = target.embedding.shape[0]
    if not 0 <= token < vocab:
        raise Differs(f"{said}: outside the vocabulary (0 to {vocab - 1})", "write the trained id")
    if target.tokenizer is not None:
        try:
            check_mask_token(token, target.tokenizer, vocab)
        except InputError as error:
            raise Differs(str(error), "train the head with another mask token") from error
    _check_filled("mask_hidden", tensors.get("mask_hidden"))
    if head.ours.get("embedding") not in ("full", "mask-row"):
        return f"{said}, never in text"
    table = tensors.get(TABLE)
    row = tensors.get(ROW) if table is None else table[token] if token < len(table) else None
    _check_filled("the mask token's embedding row", row)
    assert row is not None
    same = _find_row(target.embedding, row)
    if same is not None:
        raise Differs(
            f"the mask token's embedding row is the target's row of token {same}: never trained",
            f"store the trained row, or {REMEDY}",
        )
    return f"{said}, never in text; own row"


def _check_filled(name: str, values: Tensor | None) -> None:
    fix = REMEDY
    if values is None:
        raise Differs(f"{name} is missing", fix)
    if not torch.isfinite(values).all():
        raise Differs(f"{name} holds NaN or infinity", fix)
    if not values.any():
        raise Differs(f"{name} is all zeros: never trained", fix)


def _find_row(table: Tensor, row: Tensor) -> int | None:
    """Index of the table's row that equals `row` in its dtype."""
    if table.shape[1:] != row.shape:
        return None
    row = row.to(table.device)
    near = (table[:, 0].to(row.dtype) == row[0]).nonzero()[:, 0]
    same = near[(table[near].to(row.dtype) == row).all(-1)]
    return int(same[0]) if len(same) else None


def embedding(head: HeadFiles, target: Target) -> str:
    """What the head says of its embedding, what it stores, and whether a table is the target's."""
    table, said = head.tensors.get(TABLE), head.ours.get("embedding")
    stored = "full" if table is not None else "mask-row" if ROW in head.tensors else "shared"
    if said not in (None, stored):
        has = {"full": TABLE, "mask-row": ROW, "shared": "neither table nor row"}[stored]
        raise Differs(f"config.json says {said!r}, the files hold {has}", f"{REMEDY}")
    width, vocab = head.sizes["hidden_size"], head.sizes["vocab_size"]
    if table is None:
        if width != target.config.hidden_size:
            raise Differs(
                f"no {TABLE}: the target's table is {target.config.hidden_size} wide, not {width}",
                REMEDY,
            )
        return "the target's table" + (", own row for the mask" if stored != "shared" else "")
    if table.shape != (vocab, width):
        raise Differs(f"{TABLE} is {list(table.shape)}, not {[vocab, width]}", REMEDY)
    if table.shape != target.embedding.shape:
        return f"own table, {list(table.shape)}"
    own, other = _cosines(table, target.embedding)
    nearness = f"cosine {own:.2f} (other rows {other:.2f})"
    if not own - other > RELATED:  # NaN counts
        raise Differs(
            f"its table is unrelated to the target's: {nearness}",
            f"remove {TABLE} to share the target's, or {REMEDY}",
        )
    return f"own table, {nearness} with the target's"


def _cosines(table: Tensor, target: Tensor) -> tuple[float, float]:
    """Median cosine of sampled rows with the target's same rows, and with rows further on."""
    rows = torch.linspace(0, len(table) - 1, min(SAMPLE, len(table))).long()
    ours, theirs = table[rows].float(), target[rows.to(target.device)].float().cpu()
    near = F.cosine_similarity(ours, theirs).median()
    far = F.cosine_similarity(ours, theirs.roll(len(rows) // 2, 0)).median()
    return float(near), float(far)


def draft_vocabulary(head: HeadFiles, target: Target) -> str:
    """`d2t` and `t2d`: the target tokens that the head can draft."""
    vocab = target.embedding.shape[0]
    size = head.raw.get("draft_vocab_size") or vocab
    d2t, t2d = head.tensors.get("d2t"), head.tensors.get("t2d")
    if d2t is None:
        if size != vocab:
            raise Differs(f"d2t is missing, and only {size} of {vocab} tokens are drafted", REMEDY)
        return f"all {vocab} tokens"
    if d2t.shape != (size,):
        raise Differs(f"d2t is {list(d2t.shape)}, draft_vocab_size {size}", REMEDY)
    ids = d2t + torch.arange(size)
    offsets = "d2t holds offsets (target id = draft id + d2t[draft id]), ascending: " + REMEDY
    if int(ids.min()) < 0 or int(ids.max()) >= vocab:
        span = f"{int(ids.min())} to {int(ids.max())}"
        raise Differs(f"d2t leads to target ids {span}; there are {vocab}", offsets)
    if not (ids.diff() > 0).all():
        at = int((ids.diff() <= 0).nonzero()[0]) + 1
        raise Differs(f"target ids are not ascending at draft id {at}", offsets)
    if t2d is None:
        return f"{size} of {vocab} tokens, no t2d"
    if t2d.shape != (vocab,) or not torch.equal(t2d.nonzero()[:, 0], ids):
        found = f"{int(t2d.count_nonzero())} tokens"
        raise Differs(f"t2d marks {found}, not the {size} that d2t leads to", REMEDY)
    return f"{size} of {vocab} tokens, d2t and t2d agree"
