"""The draft vocabulary and the mask token."""

import pytest
import torch
from refusals import refused
from tiny import SPECIAL
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from peagle.train.warm_start import draft_offsets, frequent_tokens, pick_mask_token, why_unfit

WORDS = ["<unk>", "cat", "dog", "sat"]


def words_tokenizer(*added: str, **named: str) -> PreTrainedTokenizerFast:
    """Ids 0 to 3 are the words; `added` special tokens follow."""
    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", **named)
    tokenizer.add_special_tokens({"additional_special_tokens": list(added)})
    return tokenizer


def test_most_frequent_tokens_in_ascending_order() -> None:
    answers = [[7, 7, 3, 5], [], [5, 7, 9, 9, 9, 9]]
    assert frequent_tokens(iter(answers), 10, 3).tolist() == [5, 7, 9]


def test_gaps_and_ties_are_filled_with_the_lowest_ids() -> None:
    assert frequent_tokens([[8, 6]], 10, 4).tolist() == [0, 1, 6, 8]
    assert frequent_tokens([[8, 6, 4]], 10, 2).tolist() == [4, 6]
    assert frequent_tokens([[1]], 4, 4).tolist() == [0, 1, 2, 3]


def test_offsets_lead_back_to_the_target_ids() -> None:
    ids = torch.tensor([0, 4, 5, 9])
    assert draft_offsets(ids).tolist() == [0, 3, 3, 6]


def test_a_reserved_token_is_picked_first(tokenizer: PreTrainedTokenizerFast) -> None:
    picked = pick_mask_token(tokenizer, 128)
    assert picked == SPECIAL.index("<|reserved_0|>")
    assert not why_unfit(picked, tokenizer, 128)


def test_then_a_row_after_the_tokenizer() -> None:
    """Pad is not picked, whatever its name."""
    spare = words_tokenizer("<|spare|>", eos_token="<eos>")
    padded = words_tokenizer(pad_token="<|reserved|>", bos_token="<|mask_bos|>")
    for tokenizer in (spare, padded):
        assert pick_mask_token(tokenizer, 16) == len(tokenizer)


def test_then_the_last_added_token() -> None:
    tokenizer = words_tokenizer("<|a|>", "<|b|>", eos_token="<eos>")
    picked = pick_mask_token(tokenizer, len(tokenizer))
    assert tokenizer.convert_ids_to_tokens(picked) == "<|b|>"


def test_nothing_is_free() -> None:
    tokenizer = words_tokenizer(eos_token="<eos>", pad_token="<pad>")
    with refused("mask_token_id"):
        pick_mask_token(tokenizer, len(tokenizer))


@pytest.mark.parametrize(
    ("token", "why"),
    [
        (-1, "outside the embedding"),
        (128, "outside the embedding"),
        (SPECIAL.index("<|endoftext|>"), "pad, bos, eos"),
        (SPECIAL.index("<|im_start|>"), "chat template"),
        (SPECIAL.index("<|im_end|>"), "pad, bos, eos"),
        (40, "ordinary token"),
    ],
)
def test_unfit_mask_tokens(token: int, why: str, tokenizer: PreTrainedTokenizerFast) -> None:
    assert why in why_unfit(token, tokenizer, 128)


def test_rows_after_the_tokenizer_are_fit(tokenizer: PreTrainedTokenizerFast) -> None:
    assert not why_unfit(len(tokenizer), tokenizer, len(tokenizer) + 1)
