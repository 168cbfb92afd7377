"""Exactly the assistant's tokens are supervised."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from refusals import refused
from thinking import OTHER, QWEN3, byte_fallback, byte_level
from tiny import CHATML, make_tokenizer
from transformers import PreTrainedTokenizerFast

from peagle.data.chat import (
    MAX_KEPT,
    Style,
    _left_out,
    encode_documents,
    prompt_ids,
    render,
    to_messages,
    to_style,
)

TOKENIZER = make_tokenizer()
TALK = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "the cat?"},
    {"role": "assistant", "content": "the cat sat"},
    {"role": "user", "content": "and then"},
    {"role": "assistant", "content": "it ran!\n\nfar"},
]
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "mat"}'}}
BROKEN = [{"name": "look", "arguments": text} for text in ("{a", "[" * 99_999, '{"a": "\\ud83d"}')]
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
USED_TOOL = [
    {"role": "user", "content": "the cat?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "sat", "tool_call_id": "c1"},
    {"role": "assistant", "content": "it sat"},
]
WITH_TOOLS = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }} {{ c.function.arguments.at }}"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As Qwen3: what was thought is shown for the last answer only, and may be turned off.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}({{ m.thinking or '' }}){% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if think is false %}(){% endif %}"
    "{% endif %}"
)


def said(
    ids: list[int], supervised: list[bool], tokenizer: PreTrainedTokenizerFast = TOKENIZER
) -> list[str]:
    """Text of every supervised run."""
    runs, current = list[str](), list[int]()
    for token, mine in [*zip(ids, supervised, strict=True), (0, False)]:
        if mine:
            current.append(token)
        elif current:
            runs.append(tokenizer.decode(current))
            current = []
    return runs


def test_answers_and_their_end_of_turn_are_supervised() -> None:
    [(ids, supervised)] = encode_documents(TOKENIZER, TALK)
    assert said(ids, supervised) == ["the cat sat<|im_end|>", "it ran!\n\nfar<|im_end|>"]
    assert TOKENIZER.decode(ids) == render(TOKENIZER, TALK, answer=False)
    assert not supervised[-1] and TOKENIZER.decode(ids[-1:]) == "\n", "the newline behind is not"


def test_every_prefix_is_a_prompt_of_the_engine() -> None:
    """Training sees the prompt's very tokens before the first supervised one."""
    [(ids, supervised)] = encode_documents(TOKENIZER, TALK)
    assert ids[: supervised.index(True)] == prompt_ids(TOKENIZER, TALK[:2])


def test_the_users_words_in_an_answer_do_not_confuse() -> None:
    talk = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "the cat"}]
    [(ids, supervised)] = encode_documents(TOKENIZER, talk)
    assert said(ids, supervised) == ["the cat<|im_end|>"]


def test_a_conversation_that_ends_with_the_user() -> None:
    [(ids, supervised)] = encode_documents(TOKENIZER, TALK[:4])
    assert said(ids, supervised) == ["the cat sat<|im_end|>"]


def test_an_empty_answer_is_its_end_of_turn() -> None:
    talk = [TALK[1], {"role": "assistant", "content": ""}]
    assert said(*encode_documents(TOKENIZER, talk)[0]) == ["<|im_end|>"]


def test_no_assistant_turn() -> None:
    with refused():
        encode_documents(TOKENIZER, TALK[:2])


def test_tool_calls_are_supervised_and_results_are_not() -> None:
    tokenizer, messages = make_tokenizer(WITH_TOOLS), to_messages({"messages": USED_TOOL})
    [(ids, supervised)] = encode_documents(tokenizer, messages, Style(TOOLS))
    assert said(ids, supervised) == ["look mat<|im_end|>", "it sat<|im_end|>"]
    assert tokenizer.decode(ids).startswith('[{"type": "function"')


def test_arguments_of_tool_calls_become_objects() -> None:
    _, call, result, _ = to_messages({"messages": USED_TOOL})
    function = {"name": "look", "arguments": {"at": "mat"}}
    assert call["tool_calls"] == [{"id": "c1", "type": "function", "function": function}]
    assert (call["content"], result["tool_call_id"]) == ("", "c1")
    bare = {"role": "assistant", "content": "so", "tool_calls": [function]}
    assert to_messages({"messages": [bare]})[0]["tool_calls"][0]["function"] == function


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content", "thinking"])
def test_thoughts_are_read_under_each_name(name: str) -> None:
    """Servers write any of them, and a template reads another one."""
    said = {"role": "assistant", "content": "so", name: "hm"}
    [read] = to_messages({"messages": [said]})
    assert (read["thinking"], read["reasoning_content"]) == ("hm", "hm")


def test_a_template_that_has_one_place_for_text_and_thoughts() -> None:
    """GPT-OSS's, in a turn with calls; it refuses both."""
    refusal = "{{ raise_exception('Cannot pass both content and thinking!') }}"
    template = (
        "{% for m in messages %}{% if m.tool_calls %}"
        "{% if m.content and m.thinking %}" + refusal + "{% endif %}"
        "({{ m.content or m.thinking }}){{ m.tool_calls | tojson }}"
        "{% else %}({{ m.thinking }}){{ m.content }}{% endif %}{% endfor %}"
    )
    calling = {"role": "assistant", "reasoning": "hm", "tool_calls": [CALL]}
    shown = {text: to_messages({"messages": [{**calling, "content": text}]}) for text in ("so", "")}
    for text, place in {"so": "(so)[", "": "(hm)["}.items():
        assert render(make_tokenizer(template), shown[text], answer=False).startswith(place)
    said = to_messages({"messages": [{"role": "assistant", "content": "so", "reasoning": "hm"}]})
    assert render(make_tokenizer(template), said, answer=False) == "(hm)so"


@pytest.mark.parametrize("blank", ["", " \n"])
def test_blank_arguments_of_a_tool_call_are_none(blank: str) -> None:
    """Clients send them for a function without parameters."""
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": blank}}
    [said] = to_messages({"messages": [{"role": "assistant", "tool_calls": [call]}]})
    assert said["tool_calls"][0]["function"] == {"name": "look", "arguments": {}}


def test_a_template_that_shows_earlier_answers_otherwise_makes_several_documents() -> None:
    """Every answer is trained on once, behind the very prompt it was the answer to."""
    tokenizer = make_tokenizer(THINKING)
    talk = [TALK[1], {**TALK[2], "thinking": "hm"}, TALK[3], {**TALK[4], "thinking": "so"}]
    documents = encode_documents(tokenizer, talk)
    answers = ["(hm)the cat sat<|im_end|>", "(so)it ran!\n\nfar<|im_end|>"]
    assert [said(*document) for document in documents] == [[answer] for answer in answers]
    for (ids, supervised), asked in zip(documents, (talk[:1], talk[:3]), strict=True):
        assert ids[: supervised.index(True)] == prompt_ids(tokenizer, asked)


def test_what_a_template_does_with_large_tools_is_not_kept() -> None:
    tokenizer = make_tokenizer(CHATML)
    kept = _left_out.cache_info().currsize
    for number in range(3):
        style = Style([{"name": f"{number}" * MAX_KEPT}])
        assert render(tokenizer, TALK[:2], answer=True, style=style)
    assert _left_out.cache_info().currsize == kept


def test_template_arguments() -> None:
    tokenizer, style = make_tokenizer(THINKING), Style(None, {"think": False})
    assert tokenizer.decode(prompt_ids(tokenizer, TALK[:2], style)).endswith("assistant\n()")
    assert said(*encode_documents(tokenizer, TALK[:3], style)[0]) == ["the cat sat<|im_end|>"]
    assert said(*encode_documents(tokenizer, TALK[:3])[0]) == ["the cat sat<|im_end|>"]


ANSWERED = [TALK[1], {"role": "assistant", "content": "the cat sat"}]
UNSUPPORTED = QWEN3.replace("{{ (m.reasoning_content or '') | trim }}", "")


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
@pytest.mark.parametrize("marks", ["added", "special", "text"])
@pytest.mark.parametrize("template", [QWEN3, OTHER, UNSUPPORTED, QWEN3 + "{# </think> #}"])
def test_thoughts_that_the_template_makes_up_are_not_supervised(
    make: Callable[..., PreTrainedTokenizerFast], marks: str, template: str
) -> None:
    tokenizer = make(marks, template=template)
    opening = "<|hm|>" if template is OTHER else "<think>"
    [document] = encode_documents(tokenizer, ANSWERED)
    assert opening in tokenizer.decode(document.ids)
    assert said(*document, tokenizer) == ["the cat sat<|im_end|>"]


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_thoughts_of_a_record_are_supervised(make: Callable[..., PreTrainedTokenizerFast]) -> None:
    """Empty ones, too, where its answer has them."""
    tokenizer = make()
    thought = [ANSWERED[0], ANSWERED[1] | {"reasoning_content": "hm"}]
    assert said(*encode_documents(tokenizer, thought)[0], tokenizer) == [
        "<think>\nhm\n</think>\n\nthe cat sat<|im_end|>"
    ]
    tokenizer.chat_template = CHATML
    words = "<think>\n\n</think>\n\nthe cat sat"
    written = [ANSWERED[0], ANSWERED[1] | {"content": words}]
    assert said(*encode_documents(tokenizer, written)[0], tokenizer) == [words + "<|im_end|>"]
    tokenizer.chat_template = QWEN3.replace(
        "{{ m.content }}", "{{ m.content.split('</think>')[-1].lstrip() }}"
    )
    assert said(*encode_documents(tokenizer, written)[0], tokenizer) == [words + "<|im_end|>"]


def test_thoughts_that_the_prompt_begins() -> None:
    """The template ends them at once; an answer that ends them is the target's."""
    ends = "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n"
    tokenizer = byte_level(template=QWEN3.replace(ends + "{% endif %}", "<think>\n"))
    [document] = encode_documents(tokenizer, ANSWERED)
    assert "<think>\n\n</think>" in tokenizer.decode(document.ids)
    assert said(*document, tokenizer) == ["the cat sat<|im_end|>"]
    off = Style(None, {"enable_thinking": False})
    [document] = encode_documents(byte_level(), ANSWERED, off)
    assert said(*document, tokenizer) == ["the cat sat<|im_end|>"]


def test_calls_after_thoughts_that_are_made_up() -> None:
    content = "{{ m.content }}"
    calls = content + "{{ m.tool_calls | tojson if m.tool_calls }}"
    tokenizer = byte_level(template=QWEN3.replace(content, calls))
    talk = to_messages({"messages": USED_TOOL})[:2]
    [[answer]] = [said(*d, tokenizer) for d in encode_documents(tokenizer, talk, Style(TOOLS))]
    assert answer.startswith("[{") and "look" in answer


def test_a_template_whose_answers_do_not_follow_their_prompts() -> None:
    template = "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}"
    with refused() as error:
        encode_documents(make_tokenizer(template), TALK)
    assert "data regenerate" in str(error.value.fix)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "no chat template"),
        ("{{ raise_exception('no system turn') }}", "refuses this: no system turn"),
        ("{{ messages[99].content }}", "the chat template refuses this"),
        ("{% if %}", "the chat template refuses this"),
    ],
)
def test_templates_that_fail(template: str | None, message: str) -> None:
    with refused() as caught:
        prompt_ids(make_tokenizer(template), TALK)
    assert message in str(caught.value)


def test_style_of_a_record() -> None:
    record = {"tools": TOOLS, "template_args": {"think": False}}
    assert to_style(record) == Style(TOOLS, {"think": False})
    assert to_style(record).in_line() == record
    assert to_style({"tools": json.dumps(TOOLS)}) == Style(TOOLS)  # as some data sets have them
    assert to_style({"tools": [], "template_args": None}) == Style()
    assert Style().in_line() == {}
    for wrong in ({"tools": {"a": 1}}, {"tools": "look"}, {"template_args": ["a"]}):
        with refused(*wrong):
            to_style(wrong)


@pytest.mark.parametrize("half", ["mat \ud83d", "caf\udce9"])  # of an emoji; a byte, no UTF-8
def test_a_text_that_is_no_unicode_is_no_prompt(half: str) -> None:
    with refused():
        prompt_ids(TOKENIZER, [TALK[0], {"role": "user", "content": half}])


def test_prompt_opens_the_answer() -> None:
    text = TOKENIZER.decode(prompt_ids(TOKENIZER, TALK[:2]))
    assert text.endswith("<|im_start|>user\nthe cat?<|im_end|>\n<|im_start|>assistant\n")


def test_to_messages() -> None:
    assert to_messages({"messages": TALK}) == TALK
    shared = [("system", "be brief"), ("human", "hi"), ("gpt", "yes")]
    record = {"conversations": [{"from": role, "value": text} for role, text in shared]}
    assert to_messages(record) == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yes"},
    ]


def test_parts_of_a_text_are_joined() -> None:
    parts = [{"type": "text", "text": text} for text in ("be ", "brief")]
    assert to_messages({"messages": [{"role": "system", "content": parts}]}) == TALK[:1]


def test_a_null_is_no_value() -> None:
    """A row of a table has the keys of all rows."""
    call = {"id": None, "function": None, "name": "look", "arguments": None}
    turns = [
        {"role": None, "content": None, "from": "human", "value": "the cat?"},
        {"role": "assistant", "content": None, "value": None, "tool_calls": [call]},
    ]
    asked, said = to_messages({"messages": None, "conversations": turns, "system": None})
    assert asked == TALK[1]
    function = {"name": "look", "arguments": {}}
    assert said["tool_calls"] == [{"type": "function", "function": function}]


def test_a_system_prompt_beside_the_turns() -> None:
    """ShareGPT has it there; a turn goes first."""
    record = {"conversations": [{"from": "human", "value": "the cat?"}]}
    assert to_messages(record | {"system": "be brief"}) == TALK[:2]
    for none in (None, ""):
        assert to_messages(record | {"system": none}) == TALK[1:2]
    assert to_messages({"messages": TALK, "system": "be kind"}) == TALK
    with refused("system"):
        to_messages(record | {"system": 5})


@pytest.mark.parametrize("record", [{}, {"messages": []}, {"messages": "hi"}])
def test_records_without_messages(record: dict[str, Any]) -> None:
    with refused():
        to_messages(record)


@pytest.mark.parametrize(
    "turn",
    [
        "hi",
        {"role": "critic", "content": "x"},
        {"role": ["user"], "content": "x"},
        {"content": "x"},
        {"role": "tool", "content": None},
        {"role": "assistant", "content": None},
        {"role": "user", "tool_calls": [CALL]},
        {"role": "user", "content": [{"type": "image_url"}]},
        {"role": "assistant", "tool_calls": ["f"]},
        {"role": "assistant", "tool_calls": [{"function": {}}]},
        *({"role": "assistant", "tool_calls": [call]} for call in BROKEN),
    ],
)
def test_bad_turns(turn: object) -> None:
    with refused("messages[1]"):
        to_messages({"messages": [TALK[0], turn]})
