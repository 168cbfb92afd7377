"""Choosing the draft vocabulary and the mask token of a new head."""

from collections.abc import Iterable

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from peagle.errors import InputError
from peagle.model.vocab import why_unfit

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
        if not why_unfit(token, tokenizer, vocab_size):
            return token
    why = "the tokenizer has no unused token"
    fix = "add one to it and a row to the embedding, or choose a `method` that masks nothing"
    raise InputError(why, field="mask_token_id", fix=fix)
