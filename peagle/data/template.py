"""Which chat template a target's conversations are written with, and what is passed to it."""

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from peagle.config import InputError, first_line
from peagle.model.source import UNREADABLE, locate

# Texts one after another: what a target without a chat template continues.
PLAIN = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def load_tokenizer(target: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a target (folder, hub id, .gguf file, catalog name), without its weights."""
    path, revision = locate(target)
    try:
        return AutoTokenizer.from_pretrained(path, revision=revision)
    except UNREADABLE as error:
        raise InputError(f"target {target}: {first_line(error)}") from error


def use_template(tokenizer: PreTrainedTokenizerBase, file: Path) -> None:
    """Have the tokenizer write conversations with the Jinja template of `file`."""
    try:
        tokenizer.chat_template = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--chat-template {file}: {first_line(error)}") from error


def use_plain_text(tokenizer: PreTrainedTokenizerBase) -> None:
    """Have the tokenizer write conversations as their texts, one after another, behind the tokens
    that it puts before every text."""
    start = tokenizer.decode(tokenizer("")["input_ids"])
    tokenizer.chat_template = f"{{{{ {start!r} }}}}{PLAIN}" if start else PLAIN


def check_template_args(tokenizer: PreTrainedTokenizerBase, args: Mapping[str, Any]) -> None:
    """Raises InputError for an argument that the template would not read."""
    template = tokenizer.get_chat_template()
    taken = inspect.signature(tokenizer.apply_chat_template).parameters
    for name in args:
        if name in taken or name not in template:
            raise InputError(f"--chat-template-arg {name}: the chat template reads no such name")
