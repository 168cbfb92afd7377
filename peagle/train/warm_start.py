"""A new drafter to train: its draft vocabulary, its mask token, and the target's weights where
shapes allow.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from peagle.data.captured import target_hashes
from peagle.errors import InputError
from peagle.methods.registry import METHODS
from peagle.model.base_target import TargetOutput
from peagle.model.config import CorrectionConfig, Provenance
from peagle.model.drafter import Drafter
from peagle.model.target import Target
from peagle.train.passes import run_document
from peagle.train.processes import rebuilt
from peagle.train.spec import HeadSpec, drafter_config

SAMPLE = 32  # answers, the longest of which shows the usual size of features
OFFSET_NORMS = ("gemma", "gemma2", "gemma3_text", "vaultgemma")  # they multiply by 1 + w
QKV = ("q_proj.weight", "k_proj.weight", "v_proj.weight")
RESERVED = ("reserved", "unused", "mask", "extra", "dummy")  # in the names of tokens for later use
Answers = Iterable[list[int]]  # token ids of each
Captured = Callable[[], TargetOutput]  # returns what was captured of a document


def frequent_tokens(answers: Answers, vocab_size: int, size: int) -> Tensor:
    """The `size` most frequent token ids of the answers, ascending (ties and gaps: lowest ids)."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for ids in answers:
        tokens = torch.tensor(ids, dtype=torch.int64)
        counts.index_add_(0, tokens, torch.ones_like(tokens))
    return counts.argsort(descending=True, stable=True)[:size].sort().values


def draft_offsets(target_ids: Tensor) -> Tensor:
    """`d2t`: target id = draft id + d2t[draft id]."""
    return target_ids - torch.arange(len(target_ids))


def pick_mask_token(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> int:
    """An id the tokenizer never produces from text: a reserved added token, or an unused row after
    those of the tokenizer's vocabulary. Raises InputError when there is none."""
    added = sorted(tokenizer.added_tokens_decoder.items())
    named = [i for i, token in added if any(word in token.content.lower() for word in RESERVED)]
    for token in (*named, *range(len(tokenizer), vocab_size), *(i for i, _ in reversed(added))):
        if not why_unfit(token, tokenizer, vocab_size):
            return token
    why = "the tokenizer has no unused token"
    fix = "add one to it and a row to the embedding, or choose a `method` that masks nothing"
    raise InputError(why, field="mask_token_id", fix=fix)


def why_unfit(token: int, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> str:
    """The reason why `token` cannot serve as the mask token; empty where it can."""
    if not 0 <= token < vocab_size:
        return f"is outside the embedding (0 to {vocab_size - 1})"
    if token in _used_by_template(tokenizer):
        return "is used by the tokenizer (pad, bos, eos) or its chat template"
    if token < len(tokenizer) and token not in tokenizer.added_tokens_decoder:
        return "is an ordinary token: text can produce it"
    return ""


def _used_by_template(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    used = {getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos", "unk")}
    template = str(tokenizer.chat_template or "")
    used |= {i for i, token in tokenizer.added_tokens_decoder.items() if token.content in template}
    return {i for i in used if i is not None}


def with_norms(
    drafter: Drafter, target: Target, answers: Answers, spec: HeadSpec, captured: Captured | None
) -> Drafter:
    """The same head with the norms that `spec` asks for, to be trained on with them."""
    known = drafter.config
    wanted = {"fc_norm": spec.fc_norm, "norm_output": spec.norm_output}
    changes: dict[str, Any] = {name: on for name, on in wanted.items() if on is not None}
    made = rebuilt(drafter, replace(known, **changes), drafter.state_dict())
    if made.fc_norm is not None and not known.fc_norm:
        _scale_features(made, target, list(islice(answers, SAMPLE)), captured)
    return made


def new_drafter(
    target: Target, answers: Answers, spec: HeadSpec, captured: Captured | None = None
) -> Drafter:
    """A float32 drafter for `target`: its draft vocabulary is the answers' most frequent tokens.

    Copies the embedding, final norm, `lm_head` rows and the target's last `layers` layers; layer 0
    takes its q, k, v on the feature half; `fc` starts as the identity on the last feature.
    """
    vocab_size = target.embedding.shape[0]
    method = METHODS[spec.method]
    mask = pick_mask_token(target.tokenizer, vocab_size) if method.parallel else None
    config = drafter_config(target, spec, mask)
    layers = list(config.feature_layers)
    against = Provenance(target.name, **target_hashes(target), feature_layers=layers)
    config = replace(config, provenance=against)
    drafter = method.build(config).to(target.device)
    for module in drafter.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
    answers = iter(answers)
    sample = list(islice(answers, SAMPLE))
    ids = frequent_tokens(chain(sample, answers), vocab_size, config.draft_vocab_size)
    drafter.d2t.copy_(draft_offsets(ids))
    drafter.share_embedding(target.embedding)
    _copy_embedding(drafter, target, ids)
    if config.fc_norm:
        _scale_features(drafter, target, sample, captured)
    if spec.warm_start:
        _copy_layers(drafter, target, ids)
    return drafter


def with_correction(drafter: Drafter, *, frozen: bool) -> Drafter:
    """The same head with a correction to train, the one it has or a new one. `frozen`: all else
    stays as it is.

    Raises InputError for a head that drafts one token after another.
    """
    if drafter.correction is None:
        config = replace(drafter.config, correction=CorrectionConfig())
        drafter = rebuilt(drafter, config, drafter.state_dict())
    assert drafter.correction is not None
    drafter.requires_grad_(not frozen)
    drafter.correction.requires_grad_()
    return drafter


@torch.no_grad()
def _scale_features(
    drafter: Drafter, target: Target, answers: list[list[int]], captured: Captured | None
) -> None:
    """Let each feature's norm keep the size that the feature usually has, so that what follows it
    may start from weights made for features as they are."""
    assert drafter.fc_norm is not None
    layers = drafter.config.feature_layers
    output = captured() if captured else run_document(target, max(answers, key=len), layers)
    for norm, feature in zip(drafter.fc_norm, output.features.chunk(len(layers), -1), strict=True):
        sizes = feature.float().square().mean(-1).sqrt()
        nn.init.constant_(norm.get_parameter("weight"), float(sizes.median()))


@torch.no_grad()
def _copy_embedding(drafter: Drafter, target: Target, ids: Tensor) -> None:
    """The mask token starts in the middle of the draft vocabulary."""
    table = target.embedding
    middle = table[ids.to(table.device)].float().mean(0)
    if drafter.config.embedding == "mask-row":
        drafter.mask_embedding.copy_(middle)
    elif drafter.config.embedding == "full":
        _copy(drafter.embed_tokens.weight, table)
        if drafter.config.mask_token_id is not None:
            drafter.embed_tokens.weight[drafter.config.mask_token_id] = middle


@torch.no_grad()
def _copy_layers(drafter: Drafter, target: Target, ids: Tensor) -> None:
    hidden = drafter.config.transformer.hidden_size
    table = target.embedding
    drafter.fc.weight.zero_()
    drafter.fc.weight[:, -hidden:] = torch.eye(hidden)
    offset = float(target.config.model_type in OFFSET_NORMS)  # a head's norms multiply by w alone
    norm = getattr(target.decoder, "norm", None)  # GPT-2's has another name, and a bias
    _copy(drafter.norm.weight, getattr(norm, "weight", None), offset)
    _copy(drafter.lm_head.weight, target.model.get_output_embeddings().weight[ids.to(table.device)])
    last = range(target.num_layers)[-len(drafter.layers) :]
    for mine, number in zip(drafter.layers, last, strict=False):
        source = target.layer_state(number)
        # Without its gate a feed-forward is of no use. Other activations are near enough to silu.
        if "mlp.gate_proj.weight" not in source:
            source = {n: w for n, w in source.items() if not n.startswith("mlp.")}
        for name, parameter in mine.named_parameters():
            if name.endswith(QKV) and parameter.shape[1] == 2 * hidden:
                parameter[:, :hidden] *= 0.1  # the embedding half starts small
                _copy(parameter[:, hidden:], source.get(name))
            elif name.endswith("norm.weight"):
                _copy(parameter, source.get(_norm_of(name, source)), offset)
            else:
                _copy(parameter, source.get(name))


def _norm_of(name: str, source: Mapping[str, Tensor]) -> str:
    """The norm of a target's layer that does what the norm `name` of a head's layer does."""
    if name == "hidden_norm.weight":
        return "input_layernorm.weight"
    named_by_mlp = any("feedforward_layernorm" in each for each in source)  # as Gemma's
    if name == "post_attention_layernorm.weight" and named_by_mlp:  # that one ends attention
        return "pre_feedforward_layernorm.weight"
    return name


def _copy(into: Tensor, source: Tensor | None, offset: float = 0.0) -> None:
    if source is not None and source.shape == into.shape:
        into.copy_(source).add_(offset)
