"""Checks of a head's files against its target that run neither.

Each check returns its finding, or raises a `Problem` or `Skipped`.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from peagle.errors import InputError
from peagle.heads.correction import CORRECTION, digest
from peagle.heads.format import FETCH_AGAIN, HeadFiles, state_dict_of
from peagle.methods.keys import AUX_COUNT, FLAGS, LAYER_IDS, MASK_ID_KEYS, mask_ids
from peagle.methods.registry import method_of
from peagle.model.base_target import BaseTarget
from peagle.model.config import default_feature_layers
from peagle.model.fingerprints import config_hash, template_hash, weights_hash
from peagle.model.layer_config import FULL, LAYER_KEYS, OLD_ROPE, SLIDING
from peagle.model.tokenizer import check_mask_token
from peagle.shown import model_name

TABLE, ROW = "embed_tokens.weight", "mask_embedding"
SAMPLE = 512  # rows of an embedding table that are compared
RELATED = 0.1  # a row is nearer than this (cosine) to its counterpart than to another row
# Parts of the names of keys that change what a model computes.
COMPUTES = (
    "norm", "scal", "softcap", "multiplier", "rope", "rotary", "window", "bias", "sink", "gate",
    "expert", "attention", "residual", "activation", "hidden_act", "layer_type",
)  # fmt: skip


class Problem(InputError):
    """A fault of a head. `blocks`: the head would compute something else here; other faults are
    vLLM's, or of training."""

    def __init__(self, why: str, fix: str = FETCH_AGAIN, *, blocks: bool = True) -> None:
        super().__init__(why, fix=fix)
        self.blocks = blocks


class Skipped(Exception):
    """A check does not apply; the text says why."""


def _require(is_right: bool, wrong: str, fix: str = FETCH_AGAIN, *, blocks: bool = True) -> None:
    if not is_right:
        raise Problem(wrong, fix, blocks=blocks)


def run_check(name: str, head: HeadFiles, target: BaseTarget) -> str:
    """The finding of a check. Anything in the files may be missing or of another type. Raises
    Problem or Skipped."""
    try:
        return CHECKS[name](head, target)
    except Problem:
        raise
    except InputError as error:
        raise Problem(error.why, error.fix or FETCH_AGAIN) from error
    except (TypeError, ValueError, AttributeError, LookupError, RuntimeError) as error:
        raise Problem(f"config.json or tensors are malformed ({error!r})") from error


def check(head: HeadFiles, target: BaseTarget, name: str | Path, *, force: bool = False) -> None:
    """Raise InputError, which names the head, for the first problem that makes it useless here.
    `force` accepts a head of another target of the same sizes."""
    for each in CHECKS:
        try:
            run_check(each, head, target)
        except Skipped:
            pass
        except Problem as problem:
            if problem.blocks and not (force and each in FORGIVABLE):
                why = f"does not fit {model_name(target.name)}: {each}: {problem.why}"
                raise InputError(why, field="head", value=Path(name), fix=problem.fix) from problem


def sizes(head: HeadFiles, target: BaseTarget) -> str:
    """The target's hidden size and vocabulary; the draft vocabulary and the rows of `lm_head`."""
    vocab = head.sizes["vocab_size"]
    width, tokens = target.config.hidden_size, target.embedding.shape[0]
    fix = "the head is for another target: name that one"
    wrong = f"target_hidden_size is {head.target_width}, the target's is {width}"
    _require(head.target_width == width, wrong, fix)
    _require(vocab == tokens, f"vocab_size is {vocab}, the target's is {tokens}", fix)
    draft = head.raw.get("draft_vocab_size") or vocab
    rows = len(head.tensors["lm_head.weight"]) if "lm_head.weight" in head.tensors else draft
    fix = f"set draft_vocab_size to the rows of lm_head, or {FETCH_AGAIN}"
    wrong = f"draft_vocab_size is {draft}, lm_head has {rows} rows, the target {vocab} tokens"
    _require(1 <= draft <= vocab and rows == draft, wrong, fix)
    return f"hidden size {width}, vocabulary {vocab}, {draft} drafted"


def provenance(head: HeadFiles, target: BaseTarget) -> str:
    """The target it was trained for, by fingerprints of its architecture and weights."""
    known = head.trained
    if not known.config_hash and not known.weights_hash:
        raise Skipped("the head does not record its target")
    facts = (
        ("config hash", known.config_hash, config_hash(target)),
        ("weights hash", known.weights_hash, weights_hash(target)),
    )
    trained = model_name(known.target or "another target")
    fix = "name that target; for a fine-tune of its base use `force`, or `peagle train --init-from`"
    for name, recorded, found in facts:
        wrong = f"trained for {trained}: {name} {recorded}, here {found}"
        _require(recorded in ("", found), wrong, fix)
    return f"trained for {model_name(known.target or 'this target')}: hashes agree"


def chat_template(head: HeadFiles, target: BaseTarget) -> str:
    """The chat template of the training data."""
    recorded, found = head.trained.template_hash, template_hash(target)
    if not recorded:
        raise Skipped("the head does not record one")
    fix = "name the template it was trained with (`chat_template`); `force` accepts another"
    wrong = f"trained with chat template {recorded}, the target's is {found or 'absent'}"
    _require(recorded == found, wrong, fix)
    return f"hash {recorded} agrees"


def feature_layers(head: HeadFiles, target: BaseTarget) -> str:
    """Layer ids: valid, as many as `fc` reads, as trained, and where vLLM reads them."""
    count = target.num_layers
    defaults = list(default_feature_layers(count))
    top, nested = head.raw.get(LAYER_IDS), head.eagle.get(LAYER_IDS)
    ids = top or nested or defaults
    trained = head.trained.feature_layers
    also = f"their number as {AUX_COUNT}" if head.speculators else "also in eagle_config"
    fix = f"write {trained or 'the layers it was trained with'} as {LAYER_IDS}, {also}"
    _require(trained in ([], ids), f"{ids}; the head was trained with {trained}", fix)
    wrong = f"{ids} is not strictly ascending; vLLM sorts and de-duplicates it"
    _require(ids == sorted(set(ids)), wrong, fix)
    known = f"the target has layers 0 to {count - 1}, and {count} is the last one's output"
    _require(0 <= ids[0] <= ids[-1] <= count, f"{ids}: {known}", fix)
    width = head.tensors["fc.weight"].shape[1] if "fc.weight" in head.tensors else None
    wrong = f"fc reads {width} features, {ids} are {len(ids)} layers of {head.target_width}"
    _require(width in (None, len(ids) * head.target_width), wrong, fix)
    # vLLM reads the ids at the top, and may count those in eagle_config.
    wrong = f"{LAYER_IDS} is {ids}, in eagle_config {nested}"
    _require(not nested or nested == ids, wrong, fix, blocks=False)
    counted = head.counted_layers
    _require(len(ids) == counted, f"{ids}: vLLM would count {counted}", fix, blocks=False)
    wrong = f"{LAYER_IDS} is {ids} in eagle_config only: vLLM would tap {defaults}"
    _require(head.speculators or bool(top) or ids == defaults, wrong, fix, blocks=False)
    return f"{ids} of {count}, as wide as fc"


def mask_token(head: HeadFiles, target: BaseTarget) -> str:
    """The id of P-EAGLE's placeholder: one token that text never contains."""
    ids = mask_ids(head.raw)
    if not ids and not {ROW, "mask_hidden"} & head.tensors.keys():
        raise Skipped("an eagle3 head has none")
    _require(bool(ids), "config.json names no mask token id", "write it as ptd_token_id")
    token = next(iter(ids.values()))
    shown = ", ".join(f"{key} {value}" for key, value in ids.items())
    vocab = target.embedding.shape[0]
    wrong = f"{shown}: outside the vocabulary (0 to {vocab - 1})"
    _require(0 <= token < vocab, wrong, "write the trained id")
    fix = "keep the one the head was trained with"
    _require(len(set(ids.values())) == 1, f"{shown} differ", fix, blocks=False)
    if target.tokenizer is not None:
        try:
            check_mask_token(token, target.tokenizer, vocab)
        except InputError as error:
            fix = "train the head with another mask token"
            raise Problem(str(error), fix, blocks=False) from error
    return f"{shown}, never in text"


def embedding(head: HeadFiles, target: BaseTarget) -> str:
    """A table of the head's own: related to the target's."""
    table = head.tensors.get(TABLE)
    if table is None:
        width, wide = head.sizes["hidden_size"], target.config.hidden_size
        _require(width == wide, f"no {TABLE}: the target's table is {wide} wide, not {width}")
        return "the target's table"
    if table.shape != target.embedding.shape:
        return f"own table, {list(table.shape)}"
    same, other = _cosines(table, target.embedding)
    nearness = f"cosine {same:.2f} (other rows {other:.2f})"
    wrong = f"its table is unrelated to the target's: {nearness}"
    fix = f"remove {TABLE} to share the target's, or {FETCH_AGAIN}"
    _require(same - other > RELATED, wrong, fix, blocks=False)  # NaN is wrong
    return f"own table, {nearness} with the target's"


def _cosines(table: Tensor, target: Tensor) -> tuple[float, float]:
    """Median cosine of sampled rows with the target's same rows, and with rows further on."""
    rows = torch.linspace(0, len(table) - 1, min(SAMPLE, len(table))).long()
    stored, targets = table[rows].float(), target[rows.to(target.device)].float().cpu()
    near = F.cosine_similarity(stored, targets).median()
    far = F.cosine_similarity(stored, targets.roll(len(rows) // 2, 0)).median()
    return float(near), float(far)


def draft_vocabulary(head: HeadFiles, target: BaseTarget) -> str:
    """`d2t` and `t2d`: the target tokens that the head can draft."""
    vocab = target.embedding.shape[0]
    size = head.raw.get("draft_vocab_size") or vocab
    d2t, t2d = head.tensors.get("d2t"), head.tensors.get("t2d")
    if d2t is None:
        return f"all {vocab} tokens"
    ids = d2t + torch.arange(size)
    fix = "d2t holds offsets (target id = draft id + d2t[draft id]), ascending: " + FETCH_AGAIN
    first, last = int(ids.min()), int(ids.max())
    wrong = f"d2t leads to target ids {first} to {last}; there are {vocab}"
    _require(first >= 0 and last < vocab, wrong, fix)
    unsorted = (ids.diff() <= 0).nonzero()[:, 0] + 1
    wrong = f"target ids are not ascending at draft ids {unsorted[:3].tolist()}"
    _require(not len(unsorted), wrong, fix, blocks=False)
    if t2d is None:
        return f"{size} of {vocab} tokens, no t2d"
    agree = t2d.shape == (vocab,) and torch.equal(t2d.nonzero()[:, 0], ids)
    wrong = f"t2d marks {int(t2d.count_nonzero())} tokens, not the {size} that d2t leads to"
    _require(agree, wrong, blocks=False)
    return f"{size} of {vocab} tokens, d2t and t2d agree"


def keys(head: HeadFiles, target: BaseTarget) -> str:
    """Keys of config.json that change the computation: all are known here."""
    fix = "remove the key if the head was trained without it; else train another head"
    for name, value in {**head.raw, **head.sizes, **head.eagle}.items():
        if value and name not in known_keys() and any(part in name for part in COMPUTES):
            wrong = f"config.json has {name} {value!r:.40}: it changes what a head computes"
            raise Problem(f"{wrong}, and is not known here", fix)
    types = set(head.sizes.get("layer_types") or [FULL])
    wrong = f"layer_types has {sorted(types)}: here all layers of a head have one window, or none"
    _require(types in ({FULL}, {SLIDING}), wrong, "train another head")
    wrong = "use_sliding_window is true, and layer_types does not name the layers with a window"
    fix = "set it to false if the head was trained without windows"
    _require(types == {SLIDING} or not head.sizes.get("use_sliding_window"), wrong, fix)
    wrong = "use_aux_hidden_state is false: the head reads the last hidden state alone"
    fix = "set it to true if the head was trained on the feature layers; else train another head"
    _require(head.eagle.get("use_aux_hidden_state") is not False, wrong, fix)
    return "all that change the computation are known"


@cache
def known_keys() -> frozenset[str]:
    """Keys that are read, or have no effect."""
    read = {*FLAGS, *MASK_ID_KEYS, LAYER_IDS, "logit_scale", *OLD_ROPE}
    unused = {"layer_types", "use_sliding_window", "max_window_layers"}
    # NVIDIA's; every head here has these norms.
    given = {"use_input_layernorm_in_first_layer", "use_last_layernorm"}
    return LAYER_KEYS | read | unused | given


def tensors(head: HeadFiles, target: BaseTarget) -> str:
    """Names and shapes of the tensors: all that config.json asks for, and no others."""
    config = head.parse(target.num_layers)
    found = state_dict_of(head.tensors, config)
    with torch.device("meta"):
        drafter = method_of(config).build(config)
    if not head.native and TABLE not in found:  # it shares the target's
        found[TABLE] = drafter.state_dict()[TABLE]
    wanted = drafter.state_dict()
    for name, tensor in wanted.items():
        _require(name in found, f"{name} is missing")
        has, needs = list(found[name].shape), list(tensor.shape)
        _require(has == needs, f"{name} has shape {has}, not {needs}")
    unknown = sorted(found.keys() - wanted.keys())
    _require(not unknown, f"unknown tensors {unknown[:3]}")
    return f"{len(found)} of the right shapes"


def correction(head: HeadFiles, target: BaseTarget) -> str:
    """The correction: trained with this head."""
    sizes = head.correction
    if sizes is None:
        return "none"
    recorded, found = head.raw[CORRECTION].get("head"), digest(head.tensors)
    wrong = f"it was trained with another head: digest {recorded}, here {found}"
    fix = f"train one for this head (`peagle train --correction`), or remove {CORRECTION}/"
    _require(recorded == found, wrong, fix)
    return f"rank {sizes.rank}, {sizes.candidates} candidates, of this head"


# By their names, in the order in which they run.
CHECKS: dict[str, Callable[[HeadFiles, BaseTarget], str]] = {
    check.__name__.replace("_", " "): check
    for check in (
        sizes, provenance, chat_template, feature_layers, mask_token, tensors, embedding,
        draft_vocabulary, keys, correction,
    )
}  # fmt: skip
FORGIVABLE = ("provenance", "chat template")
