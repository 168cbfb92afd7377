"""Choosing the draft vocabulary and the mask token."""

from collections.abc import Iterable

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from peagle.errors import InputError

RESERVED = ("reserved", "unused", "mask", "extra", "dummy")  # in the names of tokens for later use


def frequent_tokens(answers: Iterable[list[int]], vocab_size: int, size: int) -> Tensor:
    """The `size` most frequent token ids of the answers, ascending (ties and gaps: lowest ids)."""
    if not 1 <= size <= vocab_size:
        why = f"must be 1 to {vocab_size}, the target's vocabulary"
        raise InputError(why, field="draft_vocab", value=size)
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for ids in answers:
        counts += torch.bincount(torch.tensor(ids, dtype=torch.int64), minlength=vocab_size)
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
        if not _why_unfit(token, tokenizer, vocab_size):
            return token
    why = "the tokenizer has no unused token"
    fix = "add one to it and a row to the embedding, or choose a `method` that masks nothing"
    raise InputError(why, field="mask_token_id", fix=fix)


def check_mask_token(token: int, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
    """Raise InputError unless `token` may serve as the mask token."""
    if why := _why_unfit(token, tokenizer, vocab_size):
        raise InputError(why, field="mask_token_id", value=token, fix="choose another id")


def _why_unfit(token: int, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> str:
    if not 0 <= token < vocab_size:
        return f"is outside the embedding (0 to {vocab_size - 1})"
    if token in _used_by_template(tokenizer):
        return "is used by the tokenizer (pad, bos, eos) or its chat template"
    added = tokenizer.added_tokens_decoder
    if token < len(tokenizer) and token not in added:
        return "is an ordinary token: text can produce it"
    return ""


def _used_by_template(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    used = {
        tokenizer.pad_token_id,
        tokenizer.bos_token_id,
        tokenizer.eos_token_id,
        tokenizer.unk_token_id,
    }
    template = str(tokenizer.chat_template or "")
    used |= {i for i, token in tokenizer.added_tokens_decoder.items() if token.content in template}
    return {i for i in used if i is not None}
