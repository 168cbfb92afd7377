"""The chat template of a target's conversations, and its arguments."""

import inspect
from collections.abc import Mapping
from os.path import expanduser
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from peagle.errors import InputError, first_line

NO_ARGS: Mapping[str, Any] = MappingProxyType({})
PLAIN = "plain"  # instead of a file
# Texts one after another: what a target without a chat template continues.
PLAIN_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def use_template(tokenizer: PreTrainedTokenizerBase, choice: str | None) -> None:
    """Replace the tokenizer's chat template. Fingerprints taken later include it.

    `choice` is a Jinja file, or `plain`: the texts one after another, after the tokens that the
    tokenizer puts before every text. None keeps the tokenizer's own. Raises InputError for a file
    that cannot be read; a wrong template is refused when a conversation is first written with it.
    """
    if choice == PLAIN:
        start = tokenizer.decode(tokenizer("")["input_ids"])
        begin = f"{{{{ {start!r} }}}}" if start else ""
        tokenizer.chat_template = begin + PLAIN_TEMPLATE
    elif choice is not None:
        try:
            tokenizer.chat_template = Path(expanduser(choice)).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or first_line(error)
            fix = f"give a Jinja file, or {PLAIN}"
            raise InputError(why, field="chat_template", value=Path(choice), fix=fix) from error


def check_template(tokenizer: PreTrainedTokenizerBase, *others: str) -> None:
    """Raises InputError, with what to do, when there is none to write a conversation with; `others`
    are further things to do."""
    if not tokenizer.chat_template:
        ways = "; ".join([f"name a Jinja file with `chat_template`, or {PLAIN}", *others])
        raise InputError("the target's tokenizer has no chat template", fix=ways)


def apply_template(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, Any]],
    *,
    answer: bool,
    tools: list[Any] | None = None,
    args: Mapping[str, Any] = NO_ARGS,
) -> str:
    """Return what the template makes of messages, whatever it leaves out; with `answer`, the
    opening of the assistant's turn follows.

    Raises InputError when the tokenizer has no chat template, or the template refuses.
    """
    check_template(tokenizer)
    how = {"tokenize": False, "add_generation_prompt": answer}
    try:
        return tokenizer.apply_chat_template(messages, tools=tools, **how, **args)
    except (TemplateError, TypeError, ValueError) as error:
        raise InputError(f"the chat template refuses this: {first_line(error)}") from error


def check_template_args(
    tokenizer: PreTrainedTokenizerBase, args: Mapping[str, Any], field: str = "chat_template_arg"
) -> None:
    """Raises InputError, which names the `field`, for an argument the template would not read, and
    when there is no template."""
    check_template(tokenizer)
    template = tokenizer.get_chat_template()
    taken = inspect.signature(tokenizer.apply_chat_template).parameters
    for name in args:
        if name in taken or name not in template:
            raise InputError("the chat template reads no such name", field=field, value=name)
