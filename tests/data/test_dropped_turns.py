"""No turn of a conversation vanishes: the template shows it, or it is refused by its index."""

from typing import Any

import pytest
from refusals import refused
from tiny import CHATML, make_tokenizer

from peagle.data.chat import Style, encode_documents, render

ROLES = (
    "{% for m in messages %}{% if m.role in ('system', 'user', 'assistant') %}"
    "<|im_start|>{{ m.role }}\n{{ m.content | trim | e }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The system's turn is shown where it is the first, as Llama 2 and Gemma have it.
FIRST_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ messages[0].content }}\n{% endif %}"
    "{% for m in messages %}{% if m.role in ('user', 'assistant') %}"
    "[{{ m.role }}] {{ m.content }}{% endif %}{% endfor %}"
)
# Thoughts of earlier answers are left out, as Qwen3 and DeepSeek have it.
NO_OLD_THOUGHTS = (
    "{% for m in messages %}[{{ m.role }}] "
    "{{ m.content.split('</think>')[-1] | upper if not loop.last else m.content }}{% endfor %}"
)
USER, ANSWER = {"role": "user", "content": "the cat?"}, {"role": "assistant", "content": "it sat"}
SYSTEM = {"role": "system", "content": "be brief"}
DEVELOPER = {"role": "developer", "content": "be brief"}
RESULT = {"role": "tool", "content": "mat", "tool_call_id": "c1"}
FUNCTION = {"name": "look", "arguments": {"at": "mat"}}
CALLED = {"role": "assistant", "content": "so", "tool_calls": [{"function": FUNCTION}]}


def test_a_developer_is_the_system_where_the_template_has_none() -> None:
    for template in (ROLES, FIRST_SYSTEM, CHATML):
        tokenizer = make_tokenizer(template)
        shown = render(tokenizer, [DEVELOPER, USER], answer=True)
        assert shown == render(tokenizer, [SYSTEM, USER], answer=True)
        assert "be brief" in shown
    named = make_tokenizer("{# developer #}" + CHATML)
    assert "<|im_start|>developer\nbe brief" in render(named, [DEVELOPER, USER], answer=True)


@pytest.mark.parametrize(
    ("template", "messages", "index"),
    [
        (ROLES, [USER, CALLED], 1),
        (ROLES, [USER, ANSWER, RESULT], 2),
        (CHATML, [USER, CALLED, RESULT], 1),
        (FIRST_SYSTEM, [USER, SYSTEM], 1),
        (FIRST_SYSTEM, [SYSTEM, SYSTEM, USER], 1),
        (FIRST_SYSTEM, [SYSTEM, DEVELOPER, USER], 1),
        (FIRST_SYSTEM, [SYSTEM, USER, ANSWER, {**RESULT, "content": ""}], 3),
        ("{{ messages[-1].content }}", [USER, ANSWER, USER], 0),
        ("{% for m in messages %}{{ m.role }}{% endfor %}", [USER], 0),
        (
            "{% for m in messages %}{{ m.content }}{% if m.tool_calls %}"
            "{{ m.tool_calls[0].function.name }}{% endif %}{% endfor %}",
            [USER, {**CALLED, "tool_calls": CALLED["tool_calls"] * 2}],
            1,
        ),
    ],
)
def test_a_turn_that_is_not_shown_is_refused(template: str, messages: Any, index: int) -> None:
    tokenizer = make_tokenizer(template)
    for _ in range(2):
        with refused(f"messages[{index}]"):
            render(tokenizer, messages, answer=True)


@pytest.mark.parametrize(
    ("template", "messages"),
    [
        (ROLES, [SYSTEM, {**USER, "content": "  <b> & 'c' \n"}, ANSWER, USER]),
        (ROLES, [USER, {**ANSWER, "content": ""}, {**USER, "content": " "}]),
        (NO_OLD_THOUGHTS, [USER, {**ANSWER, "content": "<think>hm</think>"}, USER]),
        (
            "{% for m in messages %}{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}"
            "{{ m.tool_call_id | length if m.role == 'tool' }}{% endfor %}",
            [USER, CALLED, RESULT, ANSWER],
        ),
    ],
)
def test_a_changed_turn_is_no_fault(template: str, messages: Any) -> None:
    assert render(make_tokenizer(template), messages, answer=True)


def test_a_template_that_demands_words_has_the_last_one() -> None:
    """It refuses the words that are tried, so nothing is known of it."""
    template = "{% if 'cat' not in messages[0].content %}{{ raise_exception('no cat') }}{% endif %}"
    assert render(make_tokenizer(template), [USER], answer=True) == ""


def test_a_template_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversation of the same roles is rendered once."""
    tokenizer, rendered = make_tokenizer(ROLES), list[Any]()
    apply = tokenizer.apply_chat_template

    def counted(messages: Any, **how: Any) -> Any:
        rendered.append(messages)
        return apply(messages, **how)

    monkeypatch.setattr(tokenizer, "apply_chat_template", counted)
    for text in ("a", "b", "c"):
        render(tokenizer, [SYSTEM, {**USER, "content": text}], answer=True)
    assert len(rendered) == 4
    tokenizer.chat_template = FIRST_SYSTEM
    render(tokenizer, [SYSTEM, USER], answer=True)
    assert len(rendered) == 6, "another template may be another one"


def test_tools_and_arguments_may_decide() -> None:
    """A template that shows results where there are tools, or where it is told to."""
    template = (
        "{% for m in messages %}{% if m.role != 'tool' or tools or keep %}{{ m.content }}"
        "{% endif %}{% endfor %}"
    )
    tokenizer, talk = make_tokenizer(template), [USER, ANSWER, RESULT]
    with refused("messages[2]"):
        render(tokenizer, talk, answer=True)
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    assert render(tokenizer, talk, answer=True, style=Style([tool])).endswith("mat")
    assert render(tokenizer, talk, answer=True, style=Style(None, {"keep": True})).endswith("mat")


def test_training_data() -> None:
    with refused("messages[1]"):
        encode_documents(make_tokenizer(ROLES), [USER, CALLED, RESULT, ANSWER])
    [document] = encode_documents(make_tokenizer(ROLES), [DEVELOPER, USER, ANSWER])
    assert "be brief" in make_tokenizer().decode(document.ids)
