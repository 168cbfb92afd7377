"""Shared fixtures; the tiny random models themselves are in tiny.py and model/families.py."""

import pytest
from tiny import make_tokenizer
from transformers import PreTrainedTokenizerFast


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()
