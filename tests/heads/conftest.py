"""A tiny target with a tokenizer, by whose template heads know it again."""

import pytest
from tiny_heads import tiny_target
from transformers import PreTrainedTokenizerFast

from peagle.model.target import Target


@pytest.fixture(scope="module")
def target(tokenizer: PreTrainedTokenizerFast) -> Target:
    return tiny_target(tokenizer=tokenizer)
