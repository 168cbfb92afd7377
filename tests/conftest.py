"""Shared fixtures; the tiny random models themselves are in tiny.py and model/families.py."""

import os
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

if not torch.cuda.is_available():  # before anything imports Triton, as transformers does
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def tokenizer() -> "PreTrainedTokenizerFast":
    from tiny import make_tokenizer  # noqa: PLC0415

    return make_tokenizer()
