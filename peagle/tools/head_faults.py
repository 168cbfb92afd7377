"""Checks for faults with which a head still runs here: vLLM reads it otherwise, or its training
went wrong. Each continues a check of heads/checks.py, and is run after that has passed."""

import torch
import torch.nn.functional as F
from torch import Tensor

from peagle.heads.checks import OFFSETS, TABLE, Check, drafted_ids, layers_fix, require
from peagle.heads.format import FETCH_AGAIN, HeadFiles
from peagle.methods.keys import LAYER_IDS, mask_ids
from peagle.model.base_target import BaseTarget
from peagle.model.config import default_feature_layers
from peagle.train.warm_start import why_unfit

SAMPLE = 512  # rows of an embedding table that are compared
RELATED = 0.1  # a row is nearer than this (cosine) to its counterpart than to another row


def layers_for_vllm(head: HeadFiles, target: BaseTarget) -> str:
    """Layer ids where vLLM reads them: at the top, and it may count those in eagle_config."""
    count = target.num_layers
    defaults = list(default_feature_layers(count))
    top = head.raw.get(LAYER_IDS)
    nested = head.eagle.get(LAYER_IDS)
    ids = head.layers or defaults
    fix = layers_fix(head)
    require(not nested or nested == ids, f"{LAYER_IDS} is {ids}, in eagle_config {nested}", fix)
    counted = head.counted_layers
    require(len(ids) == counted, f"{ids}: vLLM would count {counted}", fix)
    wrong = f"{LAYER_IDS} is {ids} in eagle_config only: vLLM would tap {defaults}"
    require(head.speculators or bool(top) or ids == defaults, wrong, fix)
    return f"{ids} of {count}, as wide as fc"


def mask_never_in_text(head: HeadFiles, target: BaseTarget) -> str:
    """One mask token by all its names, which text never contains."""
    ids = mask_ids(head.raw)
    shown = ", ".join(f"{key} {value}" for key, value in ids.items())
    fix = "keep the one the head was trained with"
    require(len(set(ids.values())) == 1, f"{shown} differ", fix)
    if target.tokenizer is not None:
        token = next(iter(ids.values()))
        why = why_unfit(token, target.tokenizer, target.embedding.shape[0])
        require(not why, f"{shown}: {why}", "train the head with another mask token")
    return f"{shown}, never in text"


def related_table(head: HeadFiles, target: BaseTarget) -> str:
    """A table of the head's own: related to the target's."""
    table = head.tensors.get(TABLE)
    if table is None:
        return "the target's table"
    if table.shape != target.embedding.shape:
        return f"own table, {list(table.shape)}"
    same, other = _cosines(table, target.embedding)
    nearness = f"cosine {same:.2f} (other rows {other:.2f})"
    wrong = f"its table is unrelated to the target's: {nearness}"
    fix = f"remove {TABLE} to share the target's, or {FETCH_AGAIN}"
    require(same - other > RELATED, wrong, fix)  # NaN is wrong
    return f"own table, {nearness} with the target's"


def _cosines(table: Tensor, target: Tensor) -> tuple[float, float]:
    """Median cosine of sampled rows with the target's same rows, and with rows further on."""
    rows = torch.linspace(0, len(table) - 1, min(SAMPLE, len(table))).long()
    stored = table[rows].float()
    targets = target[rows.to(target.device)].float().cpu()
    near = F.cosine_similarity(stored, targets).median()
    far = F.cosine_similarity(stored, targets.roll(len(rows) // 2, 0)).median()
    return float(near), float(far)


def vocabulary_for_vllm(head: HeadFiles, target: BaseTarget) -> str:
    """`d2t` ascends, and `t2d` is its inverse."""
    vocab = target.embedding.shape[0]
    if "d2t" not in head.tensors:
        return f"all {vocab} tokens"
    ids = drafted_ids(head)
    unsorted = (ids.diff() <= 0).nonzero()[:, 0] + 1
    wrong = f"target ids are not ascending at draft ids {unsorted[:3].tolist()}"
    require(not len(unsorted), wrong, OFFSETS)
    t2d = head.tensors.get("t2d")
    if t2d is None:
        return f"{len(ids)} of {vocab} tokens, no t2d"
    agree = t2d.shape == (vocab,) and torch.equal(t2d.nonzero()[:, 0], ids)
    wrong = f"t2d marks {int(t2d.count_nonzero())} tokens, not the {len(ids)} that d2t leads to"
    require(agree, wrong)
    return f"{len(ids)} of {vocab} tokens, d2t and t2d agree"


FURTHER: dict[str, Check] = {  # by the name of the check that each continues
    "feature layers": layers_for_vllm,
    "mask token": mask_never_in_text,
    "embedding": related_table,
    "draft vocabulary": vocabulary_for_vllm,
}
