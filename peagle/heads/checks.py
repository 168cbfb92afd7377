"""A head on disk beside its target: what can be checked without running either.

Each check returns what it found, or raises a `Problem` or `Skipped`.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from peagle.errors import InputError
from peagle.heads.correction import FOLDER, digest, parse_correction
from peagle.heads.format import REMEDY, HeadFiles, parse, state_dict_of
from peagle.methods.keys import FLAGS, LAYER_IDS, MASK_ID_KEYS, mask_ids
from peagle.methods.registry import method_of
from peagle.model.config import TRANSFORMERS, default_feature_layers
from peagle.model.fingerprints import config_hash, template_hash, weights_hash
from peagle.model.target import Target
from peagle.model.vocab import check_mask_token
from peagle.shown import model_name

TABLE, ROW = "embed_tokens.weight", "mask_embedding"
SAMPLE = 512  # rows of an embedding table that are compared
RELATED = 0.1  # a row is nearer than this (cosine) to its counterpart than to another row
# Parts of the names of keys that change what a model computes.
COMPUTES = (
    "norm", "scal", "softcap", "multiplier", "rope", "rotary", "window", "bias", "sink", "gate",
    "expert", "attention", "residual", "activation", "hidden_act", "layer_type",
)  # fmt: skip


class Problem(Exception):
    """Something that is wrong with a head, and the fix."""

    check = ""  # the name of the check that found it

    def __init__(self, found: str, fix: str, *, blocks: bool = True) -> None:
        """`blocks`: the head would compute something else here; other problems are vLLM's, or of
        training."""
        super().__init__(found)
        self.found, self.fix, self.blocks = found, fix, blocks

    @property
    def forgivable(self) -> bool:
        """The head may be used with this target if the user says so."""
        return self.check in FORGIVABLE

    def __str__(self) -> str:
        return f"{self.check}: {self.found}; {self.fix}"


class Skipped(Exception):
    """A check does not apply; the text says why."""


def _require(is_right: bool, wrong: str, fix: str = REMEDY, *, blocks: bool = True) -> None:
    if not is_right:
        raise Problem(wrong, fix, blocks=blocks)


def validate(raw: dict[str, Any], tensors: dict[str, Tensor], target: Target) -> list[Problem]:
    """All problems of a head's config.json and tensors (by our names) beside `target`, in the order
    of `CHECKS`."""
    head = HeadFiles(raw, tensors)
    problems = list[Problem]()
    for name in CHECKS:
        try:
            run_check(name, head, target)
        except Problem as problem:
            problems.append(problem)
        except Skipped:
            pass
    return problems


def run_check(name: str, head: HeadFiles, target: Target) -> str:
    """What a check found. Anything in the files may be missing or of another type. Raises Problem
    or Skipped."""
    try:
        return CHECKS[name](head, target)
    except Problem as problem:
        problem.check = name
        raise
    except InputError as error:
        wrong = Problem(str(error).removesuffix(f"; {REMEDY}"), REMEDY)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        wrong = Problem(f"config.json or tensors are malformed ({error!r})", REMEDY)
    wrong.check = name
    raise wrong


def sizes(head: HeadFiles, target: Target) -> str:
    """Target hidden size and vocabulary; the draft vocabulary and the rows of `lm_head`."""
    vocab = head.sizes["vocab_size"]
    width, tokens = target.config.hidden_size, target.embedding.shape[0]
    fix = "the head is for another target: name that one"
    wrong = f"target_hidden_size is {head.target_width}, the target's is {width}"
    _require(head.target_width == width, wrong, fix)
    _require(vocab == tokens, f"vocab_size is {vocab}, the target's is {tokens}", fix)
    draft = head.raw.get("draft_vocab_size") or vocab
    rows = len(head.tensors["lm_head.weight"]) if "lm_head.weight" in head.tensors else draft
    wrong = f"draft_vocab_size is {draft}, lm_head has {rows} rows, the target {vocab} tokens"
    fix = f"set draft_vocab_size to the rows of lm_head, or {REMEDY}"
    _require(1 <= draft <= vocab and rows == draft, wrong, fix)
    return f"hidden size {width}, vocabulary {vocab}, {draft} drafted"


def provenance(head: HeadFiles, target: Target) -> str:
    """The target it was trained for, by fingerprints of its architecture and weights."""
    known = head.trained
    if not known.config_hash and not known.weights_hash:
        raise Skipped("the head does not record its target")
    facts = {
        "config hash": (known.config_hash, config_hash(target)),
        "weights hash": (known.weights_hash, weights_hash(target)),
    }
    fix = (
        "name that target; for a fine-tune of the same base use `force`, or train the head on its "
        "answers (`peagle train --init-from`)"
    )
    for name, (said, found) in facts.items():
        trained = model_name(known.target or "another target")
        _require(
            not said or said == found, f"trained for {trained}: {name} {said}, here {found}", fix
        )
    return f"trained for {model_name(known.target or 'this target')}: hashes agree"


def chat_template(head: HeadFiles, target: Target) -> str:
    """The chat template the training data was made with."""
    said, found = head.trained.template_hash, template_hash(target)
    if not said:
        raise Skipped("the head does not record one")
    fix = "name the template it was trained with (`chat_template`); `force` accepts another"
    wrong = f"trained with chat template {said}, the target's is {found or 'absent'}"
    _require(said == found, wrong, fix)
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
    _require(not trained or trained == ids, f"{ids}; the head was trained with {trained}", rewrite)
    wrong = f"{ids} is not strictly ascending; vLLM sorts and de-duplicates it"
    _require(ids == sorted(set(ids)), wrong, rewrite)
    known = f"the target has layers 0 to {count - 1}, and {count} is what leaves the last"
    _require(0 <= ids[0] <= ids[-1] <= count, f"{ids}: {known}", rewrite)
    width = head.tensors["fc.weight"].shape[1] if "fc.weight" in head.tensors else None
    wrong = f"fc reads {width} features, {ids} are {len(ids)} layers of {head.target_width}"
    _require(width in (None, len(ids) * head.target_width), wrong, rewrite)
    if not head.speculators:
        _check_places(ids, top, nested, defaults, rewrite)
    return f"{ids} of {count}, as wide as fc"


def _check_places(ids: list[int], top: Any, nested: Any, defaults: list[int], rewrite: str) -> None:
    """vLLM reads layer ids in two places: the values at the top, the count in eagle_config."""
    wrong = ""
    if nested and nested != ids:
        wrong = f"{LAYER_IDS} is {ids}, in eagle_config {nested}"
    elif not top and ids != defaults:
        wrong = f"{LAYER_IDS} is {ids} in eagle_config only: vLLM would tap {defaults}"
    elif not nested and len(ids) != len(defaults):
        wrong = f"{ids} is not in eagle_config: vLLM would count {len(defaults)}"
    _require(not wrong, wrong, rewrite, blocks=False)


def mask_token(head: HeadFiles, target: Target) -> str:
    """The placeholder of P-EAGLE: one id that text never produces, its row and its feature."""
    ids, tensors = mask_ids(head.raw), head.tensors
    if not ids and not {ROW, "mask_hidden"} & tensors.keys():
        raise Skipped("an eagle3 head has none")
    _require(bool(ids), "config.json names no mask token id", "write it as ptd_token_id")
    token = next(iter(ids.values()))
    said = ", ".join(f"{key} {value}" for key, value in ids.items())
    vocab = target.embedding.shape[0]
    wrong = f"{said}: outside the vocabulary (0 to {vocab - 1})"
    _require(0 <= token < vocab, wrong, "write the trained id")
    _check_filled("mask_hidden", tensors.get("mask_hidden"))
    fix = "keep the one the head was trained with"
    _require(len(set(ids.values())) == 1, f"{said} differ", fix, blocks=False)
    if target.tokenizer is not None:
        try:
            check_mask_token(token, target.tokenizer, vocab)
        except InputError as error:
            fix = "train the head with another mask token"
            raise Problem(str(error), fix, blocks=False) from error
    if head.ours.get("embedding") not in ("full", "mask-row"):
        return f"{said}, never in text"
    table = tensors.get(TABLE)
    row = tensors.get(ROW) if table is None else table[token] if token < len(table) else None
    _check_filled("the mask token's embedding row", row)
    assert row is not None
    same = _find_row(target.embedding, row)
    wrong = f"the mask token's embedding row is the target's row of token {same}: never trained"
    _require(same is None, wrong, f"store the trained row, or {REMEDY}", blocks=False)
    return f"{said}, never in text; own row"


def _check_filled(name: str, values: Tensor | None) -> None:
    if values is None:
        raise Problem(f"{name} is missing", REMEDY)
    finite = bool(torch.isfinite(values).all())
    _require(finite, f"{name} holds NaN or infinity", blocks=False)
    _require(bool(values.any()), f"{name} is all zeros: never trained", blocks=False)


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
    has = {"full": TABLE, "mask-row": ROW, "shared": "neither table nor row"}[stored]
    _require(said in (None, stored), f"config.json says {said!r}, the files hold {has}")
    width, vocab = head.sizes["hidden_size"], head.sizes["vocab_size"]
    if table is None:
        wide = target.config.hidden_size
        _require(width == wide, f"no {TABLE}: the target's table is {wide} wide, not {width}")
        return "the target's table" + (", own row for the mask" if stored != "shared" else "")
    wrong = f"{TABLE} is {list(table.shape)}, not {[vocab, width]}"
    _require(table.shape == (vocab, width), wrong)
    if table.shape != target.embedding.shape:
        return f"own table, {list(table.shape)}"
    own, other = _cosines(table, target.embedding)
    nearness = f"cosine {own:.2f} (other rows {other:.2f})"
    wrong = f"its table is unrelated to the target's: {nearness}"
    fix = f"remove {TABLE} to share the target's, or {REMEDY}"
    _require(own - other > RELATED, wrong, fix, blocks=False)  # NaN is wrong
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
        wrong = f"d2t is missing, and only {size} of {vocab} tokens are drafted"
        _require(size == vocab, wrong)
        return f"all {vocab} tokens"
    _require(d2t.shape == (size,), f"d2t is {list(d2t.shape)}, draft_vocab_size {size}")
    ids = d2t + torch.arange(size)
    offsets = "d2t holds offsets (target id = draft id + d2t[draft id]), ascending: " + REMEDY
    least, most = int(ids.min()), int(ids.max())
    wrong = f"d2t leads to target ids {least} to {most}; there are {vocab}"
    _require(least >= 0 and most < vocab, wrong, offsets)
    if not (ids.diff() > 0).all():
        at = int((ids.diff() <= 0).nonzero()[0]) + 1
        raise Problem(f"target ids are not ascending at draft id {at}", offsets, blocks=False)
    if t2d is None:
        return f"{size} of {vocab} tokens, no t2d"
    agree = t2d.shape == (vocab,) and torch.equal(t2d.nonzero()[:, 0], ids)
    wrong = f"t2d marks {int(t2d.count_nonzero())} tokens, not the {size} that d2t leads to"
    _require(agree, wrong, blocks=False)
    return f"{size} of {vocab} tokens, d2t and t2d agree"


def keys(head: HeadFiles, target: Target) -> str:
    """Keys of config.json that change the computation are all known here."""
    eagle = head.raw.get("eagle_config") or {}
    fix = "remove the key if the head was trained without it; else train another head"
    for name, value in {**head.raw, **head.sizes, **eagle}.items():
        if value and name not in known_keys() and any(part in name for part in COMPUTES):
            wrong = f"config.json has {name} {value!r:.40}: it changes what a head computes"
            raise Problem(f"{wrong}, and is not known here", fix)
    wrong = "use_sliding_window is true, and heads see their whole context here"
    fix = "set it to false if the head was trained without windows"
    _require(not head.sizes.get("use_sliding_window"), wrong, fix)
    wrong = "use_aux_hidden_state is false: the head reads the last hidden state alone"
    fix = "set it to true if the head was trained on the feature layers; else train another head"
    _require(eagle.get("use_aux_hidden_state") is not False, wrong, fix)
    return "all that change the computation are known"


@cache
def known_keys() -> frozenset[str]:
    """Keys that are read, or of no consequence."""
    ours = {*FLAGS, *MASK_ID_KEYS, LAYER_IDS, "logit_scale", "rope_theta", "rope_scaling"}
    sizes = {key for config in TRANSFORMERS.values() for key in config().to_dict()}
    return frozenset(ours | sizes | {"use_sliding_window", "max_window_layers", "sliding_window"})


def tensors(head: HeadFiles, target: Target) -> str:
    """Names and shapes of the tensors are those that config.json asks for."""
    config = parse(head.raw, Path("config.json"), len(target.layers))
    found = state_dict_of(head.tensors, config)
    with torch.device("meta"):
        wanted = method_of(config).build(config).state_dict()
    if not head.ours and TABLE not in found:  # it shares the target's
        wanted.pop(TABLE, None)
    for name, tensor in wanted.items():
        _require(name in found, f"missing tensor {name!r}")
        shapes = f"{list(found[name].shape)}, expected {list(tensor.shape)}"
        _require(found[name].shape == tensor.shape, f"tensor {name!r} has shape {shapes}")
    if unknown := sorted(found.keys() - wanted.keys()):
        raise Problem(f"unknown tensor {unknown[0]!r}", REMEDY)
    return f"{len(wanted)} of the right shapes"


def correction(head: HeadFiles, target: Target) -> str:
    """A correction was trained with this head."""
    about = head.raw.get(FOLDER)
    if about is None:
        return "none"
    said, found = about.get("head"), digest(head.tensors)
    wrong = f"it was trained with another head: digest {said}, here {found}"
    fix = f"train one for this head (`peagle train --correction`), or remove {FOLDER}/"
    _require(said == found, wrong, fix)
    sizes = parse_correction(about)
    assert sizes is not None
    return f"rank {sizes.rank}, {sizes.candidates} candidates, of this head"


# By their names, in the order in which they run.
CHECKS: dict[str, Callable[[HeadFiles, Target], str]] = {
    check.__name__.replace("_", " "): check
    for check in (
        sizes, provenance, chat_template, feature_layers, mask_token, embedding, draft_vocabulary,
        keys, tensors, correction,
    )
}  # fmt: skip
FORGIVABLE = ("provenance", "chat template")
