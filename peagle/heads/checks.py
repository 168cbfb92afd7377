"""Checks that a head computes what it was trained for with its target. They run neither.

Each check returns its finding, or raises InputError or `Skipped`.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from peagle.catalog import model_name
from peagle.errors import InputError
from peagle.heads.format import FETCH_AGAIN, HeadFiles, state_dict_of
from peagle.methods.keys import AUX_COUNT, CORRECTION, LAYER_IDS, READ, digest, mask_ids
from peagle.methods.registry import method_of
from peagle.model.base_target import BaseTarget
from peagle.model.config import default_feature_layers
from peagle.model.fingerprints import config_hash, template_hash, weights_hash
from peagle.model.layer_config import FULL, LAYER_KEYS, SLIDING

TABLE = "embed_tokens.weight"
OFFSETS = f"d2t holds offsets (target id = draft id + d2t[draft id]), ascending: {FETCH_AGAIN}"
Check = Callable[[HeadFiles, BaseTarget], str]
# Parts of the names of keys that change what a model computes.
COMPUTES = (
    "norm", "scal", "softcap", "multiplier", "rope", "rotary", "window", "bias", "sink", "gate",
    "expert", "attention", "residual", "activation", "hidden_act", "layer_type",
)  # fmt: skip
# Keys that are read or have no effect. The last two are NVIDIA's: every head here has these norms.
KNOWN = LAYER_KEYS | READ | {
    "logit_scale", "rope_theta", "rope_scaling", "layer_types", "use_sliding_window",
    "max_window_layers", "use_input_layernorm_in_first_layer", "use_last_layernorm",
}  # fmt: skip


class Skipped(Exception):
    """A check does not apply; the text says why."""


def require(is_right: bool, wrong: str, fix: str = FETCH_AGAIN) -> None:
    """Raise InputError unless something is right."""
    if not is_right:
        raise InputError(wrong, fix=fix)


def run_check(check: Check, head: HeadFiles, target: BaseTarget) -> str:
    """The finding of a check. Anything in the files may be missing or of another type. Raises
    InputError or Skipped."""
    try:
        return check(head, target)
    except InputError as error:
        raise InputError(error.why, fix=error.fix or FETCH_AGAIN) from error
    except (TypeError, ValueError, AttributeError, LookupError, RuntimeError) as error:
        why = f"config.json or tensors are malformed ({error!r})"
        raise InputError(why, fix=FETCH_AGAIN) from error


def check(head: HeadFiles, target: BaseTarget, name: str | Path, *, force: bool = False) -> None:
    """Raise InputError, which names the head, for its first problem. `force` accepts a head of
    another target of the same sizes."""
    for each, run in CHECKS.items():
        if force and each in FORGIVABLE:
            continue
        try:
            run_check(run, head, target)
        except Skipped:
            pass
        except InputError as problem:
            why = f"does not fit {model_name(target.name)}: {each}: {problem.why}"
            raise InputError(why, field="head", value=Path(name), fix=problem.fix) from problem


def sizes(head: HeadFiles, target: BaseTarget) -> str:
    """The target's hidden size and vocabulary; the draft vocabulary and the rows of `lm_head`."""
    vocab = head.sizes["vocab_size"]
    width = target.config.hidden_size
    tokens = target.embedding.shape[0]
    fix = "the head is for another target: name that one"
    wrong = f"target_hidden_size is {head.target_width}, the target's is {width}"
    require(head.target_width == width, wrong, fix)
    require(vocab == tokens, f"vocab_size is {vocab}, the target's is {tokens}", fix)
    draft = head.raw.get("draft_vocab_size") or vocab
    rows = len(head.tensors["lm_head.weight"]) if "lm_head.weight" in head.tensors else draft
    fix = f"set draft_vocab_size to the rows of lm_head, or {FETCH_AGAIN}"
    wrong = f"draft_vocab_size is {draft}, lm_head has {rows} rows, the target {vocab} tokens"
    require(1 <= draft <= vocab and rows == draft, wrong, fix)
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
        require(recorded in ("", found), wrong, fix)
    return f"trained for {model_name(known.target or 'this target')}: hashes agree"


def chat_template(head: HeadFiles, target: BaseTarget) -> str:
    """The chat template of the training data."""
    recorded = head.trained.template_hash
    found = template_hash(target)
    if not recorded:
        raise Skipped("the head does not record one")
    fix = "name the template it was trained with (`chat_template`); `force` accepts another"
    wrong = f"trained with chat template {recorded}, the target's is {found or 'absent'}"
    require(recorded == found, wrong, fix)
    return f"hash {recorded} agrees"


def feature_layers(head: HeadFiles, target: BaseTarget) -> str:
    """Layer ids: valid, as many as `fc` reads, and as trained."""
    count = target.num_layers
    ids = head.layers or list(default_feature_layers(count))
    trained = head.trained.feature_layers
    fix = layers_fix(head)
    require(trained in ([], ids), f"{ids}; the head was trained with {trained}", fix)
    wrong = f"{ids} is not strictly ascending; vLLM sorts and de-duplicates it"
    require(ids == sorted(set(ids)), wrong, fix)
    known = f"the target has layers 0 to {count - 1}, and {count} is the last one's output"
    require(0 <= ids[0] <= ids[-1] <= count, f"{ids}: {known}", fix)
    width = head.tensors["fc.weight"].shape[1] if "fc.weight" in head.tensors else None
    wrong = f"fc reads {width} features, {ids} are {len(ids)} layers of {head.target_width}"
    require(width in (None, len(ids) * head.target_width), wrong, fix)
    return f"{ids} of {count}, as wide as fc"


def layers_fix(head: HeadFiles) -> str:
    """The fix of layer ids."""
    trained = head.trained.feature_layers or "the layers it was trained with"
    also = f"their number as {AUX_COUNT}" if head.speculators else "also in eagle_config"
    return f"write {trained} as {LAYER_IDS}, {also}"


def mask_token(head: HeadFiles, target: BaseTarget) -> str:
    """The id of P-EAGLE's placeholder."""
    ids = mask_ids(head.raw)
    if not ids and not {"mask_embedding", "mask_hidden"} & head.tensors.keys():
        raise Skipped("an eagle3 head has none")
    require(bool(ids), "config.json names no mask token id", "write it as ptd_token_id")
    last = target.embedding.shape[0] - 1
    name, token = next(iter(ids.items()))
    wrong = f"{name} {token}: outside the vocabulary (0 to {last})"
    require(0 <= token <= last, wrong, "write the trained id")
    return f"{name} {token}"


def embedding(head: HeadFiles, target: BaseTarget) -> str:
    """The head's own table, or the target's, which must then be as wide."""
    if TABLE in head.tensors:
        return f"own table, {list(head.tensors[TABLE].shape)}"
    wanted = head.sizes["hidden_size"]
    width = target.config.hidden_size
    require(width == wanted, f"no {TABLE}: the target's table is {width} wide, not {wanted}")
    return "the target's table"


def draft_vocabulary(head: HeadFiles, target: BaseTarget) -> str:
    """`d2t`: the target tokens that the head can draft."""
    vocab = target.embedding.shape[0]
    if "d2t" not in head.tensors:
        return f"all {vocab} tokens"
    ids = drafted_ids(head)
    first, last = map(int, ids.aminmax())
    wrong = f"d2t leads to target ids {first} to {last}; there are {vocab}"
    require(first >= 0 and last < vocab, wrong, OFFSETS)
    return f"{len(ids)} of {vocab} tokens"


def drafted_ids(head: HeadFiles) -> Tensor:
    """The target ids that `d2t` leads to."""
    d2t = head.tensors["d2t"]
    return d2t + torch.arange(len(d2t))


def keys(head: HeadFiles, target: BaseTarget) -> str:
    """Keys of config.json that change the computation: all are known here."""
    fix = "remove the key if the head was trained without it; else train another head"
    for name, value in {**head.raw, **head.sizes, **head.eagle}.items():
        if value and name not in KNOWN and any(part in name for part in COMPUTES):
            wrong = f"config.json has {name} {value!r:.40}: it changes what a head computes"
            raise InputError(f"{wrong}, and is not known here", fix=fix)
    types = set(head.sizes.get("layer_types") or [FULL])
    wrong = f"layer_types has {sorted(types)}: here all layers of a head have one window, or none"
    require(types in ({FULL}, {SLIDING}), wrong, "train another head")
    wrong = "use_sliding_window is true, and layer_types does not name the layers with a window"
    fix = "set it to false if the head was trained without windows"
    require(types == {SLIDING} or not head.sizes.get("use_sliding_window"), wrong, fix)
    wrong = "use_aux_hidden_state is false: the head reads the last hidden state alone"
    fix = "set it to true if the head was trained on the feature layers; else train another head"
    require(head.eagle.get("use_aux_hidden_state") is not False, wrong, fix)
    return "all that change the computation are known"


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
        require(name in found, f"{name} is missing")
        shape, wanted_shape = list(found[name].shape), list(tensor.shape)
        require(shape == wanted_shape, f"{name} has shape {shape}, not {wanted_shape}")
    unknown = sorted(found.keys() - wanted.keys())
    require(not unknown, f"unknown tensors {unknown[:3]}")
    return f"{len(found)} of the right shapes"


def correction(head: HeadFiles, target: BaseTarget) -> str:
    """The correction: trained with this head."""
    sizes = head.correction
    if sizes is None:
        return "none"
    recorded = head.raw[CORRECTION].get("head")
    found = digest(head.tensors)
    wrong = f"it was trained with another head: digest {recorded}, here {found}"
    fix = f"train one for this head (`peagle train --correction`), or remove {CORRECTION}/"
    require(recorded == found, wrong, fix)
    return f"rank {sizes.rank}, {sizes.candidates} candidates, of this head"


# By their names, in the order in which they run.
CHECKS: dict[str, Check] = {
    check.__name__.replace("_", " "): check
    for check in (
        sizes, provenance, chat_template, feature_layers, mask_token, tensors, embedding,
        draft_vocabulary, keys, correction,
    )
}  # fmt: skip
FORGIVABLE = ("provenance", "chat template")
