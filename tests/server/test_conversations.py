"""/v1/chat/completions: the chat template, streams, tool calls."""

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from refusals import refused
from serving import Brake, Running, Serve, ended_request, make_llm
from thinking import say
from tiny import CHATML, make_drafter, make_target, make_tokenizer, with_call_tokens

from peagle.data.chat import Conversation, prompt_ids
from peagle.data.endpoint import connect
from peagle.data.regenerate import Report, regenerate
from peagle.engine.grammars import in_lark
from peagle.engine.llm import LLM
from peagle.engine.params import SamplingParams
from peagle.server.answers import ChatBuilder
from peagle.server.conversations import MAX_CALLS, AnswerParser, call_grammar
from peagle.server.responses import Delta

ASKED: Any = [{"role": "system", "content": "a"}, {"role": "user", "content": "the cat"}]
TOOL: Any = {"type": "function", "function": {"name": "sit", "parameters": {"type": "object"}}}
CALLING = CHATML + "{# <tool_call> #}"  # a template that writes calls so
CALL = '<tool_call>\n{"name": "sit", "arguments": {"on": "mat"}}\n</tool_call>'


def alone(llm: LLM, **params: Any) -> str:
    return llm.generate([prompt_ids(llm.tokenizer, ASKED)], SamplingParams(**params))[0].text


def test_the_engines_text(running: Running, llm: LLM) -> None:
    got = running.chat(ASKED, temperature=0, max_completion_tokens=30)
    [choice] = got.choices
    assert choice.message.content == alone(llm, max_tokens=30)
    assert (choice.message.role, choice.finish_reason) == ("assistant", "length")


def test_parts_of_text(running: Running, llm: LLM) -> None:
    parts: Any = [{"type": "text", "text": "the "}, {"type": "text", "text": "cat"}]
    got = running.chat([ASKED[0], {"role": "user", "content": parts}], temperature=0, max_tokens=9)
    assert got.choices[0].message.content == alone(llm, max_tokens=9)


def test_streamed(running: Running, llm: LLM) -> None:
    wanted = [alone(llm, max_tokens=12, temperature=1.0, seed=seed) for seed in (4, 5)]
    texts, ends, roles = ["", ""], list[Any](), [list[Any](), list[Any]()]
    for part in running.chat(ASKED, n=2, seed=4, max_tokens=12, stream=True):
        assert part.usage is None
        for choice in part.choices:
            texts[choice.index] += choice.delta.content or ""
            roles[choice.index].append(choice.delta.role)
            ends += [choice.finish_reason] if choice.finish_reason else []
    assert texts == wanted
    assert all(own == ["assistant"] + [None] * len(own[1:]) for own in roles) and len(ends) == 2


def test_no_part_comes_before_the_engines_first(serve: Serve, brake: Brake) -> None:
    """Clients take the time to the first token from the first part."""
    running = serve()
    brake.go.clear()
    body = {"messages": ASKED, "max_tokens": 3, "stream": True}
    chat = "/v1/chat/completions"
    with (
        pytest.raises(httpx2.ReadTimeout),
        running.http() as http,
        http.stream("POST", chat, json=body, timeout=0.5) as response,
    ):
        next(response.iter_lines())
    brake.go.set()


def test_logprobs(running: Running, llm: LLM) -> None:
    got = running.chat(ASKED, temperature=0, max_tokens=6, logprobs=True, top_logprobs=2)
    shown = got.choices[0].logprobs
    assert shown is not None and shown.content is not None and len(shown.content) == 6
    assert "".join(entry.token for entry in shown.content) == got.choices[0].message.content
    for entry in shown.content:
        assert entry.top_logprobs[0].logprob == pytest.approx(entry.logprob)
        assert entry.bytes is not None and bytes(entry.bytes).decode() == entry.token


def test_json_schema(running: Running) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["a"]}}}
    got = running.chat(ASKED, response_format=form, max_tokens=20)
    assert json.loads(got.choices[0].message.content or "") == "a"


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_is_called(serve: Serve, stream: bool) -> None:
    """The template is told of tools; the answer is made to be a call."""
    running = serve()
    tokenizer = running.api.llm.tokenizer
    tokenizer.chat_template = "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}" + CHATML
    grammar = {"structured_outputs": {"choice": ["ok " + CALL]}}
    got = running.chat(ASKED, tools=[TOOL], extra_body=grammar, stream=stream)
    if stream:
        choices = [part.choices[0] for part in got]
        emitted = "".join(choice.delta.content or "" for choice in choices)
        [calls] = [choice.delta.tool_calls for choice in choices if choice.delta.tool_calls]
        assert calls[0].index == 0
        end = choices[-1].finish_reason
    else:
        choice, with_tool = got.choices[0], got.usage.prompt_tokens
        message, end = choice.message, choice.finish_reason
        emitted, calls = message.content, message.tool_calls
        assert "index" not in calls[0].model_dump()
        assert with_tool > len(prompt_ids(tokenizer, ASKED)), "the template has seen the tool"
    assert (emitted.strip(), end) == ("ok", "tool_calls")
    assert calls[0].function.name == "sit"
    assert json.loads(calls[0].function.arguments) == {"on": "mat"}


def lie(on: dict[str, Any]) -> Any:
    parameters = {"type": "object", "properties": {"on": on}, "required": ["on"]}
    parameters |= {"additionalProperties": False, "$defs": {"mat": {"enum": ["mat", 7]}}}
    return {"type": "function", "function": {"name": "läg", "parameters": parameters}}


@pytest.mark.parametrize("stream", [False, True])
def test_half_of_a_character_in_a_call(serve: Serve, stream: bool) -> None:
    """A model can escape it in JSON, and no answer can be sent with it."""
    running = serve()
    half = '<tool_call>\n{"name": "sit\\udc00", "arguments": {"on": "\\ud83d mat"}}\n</tool_call>'
    form = {"structured_outputs": {"choice": [half]}}
    got = running.chat(ASKED, tools=[TOOL], extra_body=form, max_tokens=100, stream=stream)
    [*_, last] = [part.choices[0] for part in (got if stream else [got])]
    [call] = (last.delta if stream else last.message).tool_calls
    assert call.function.name == "sit\N{REPLACEMENT CHARACTER}"
    assert json.loads(call.function.arguments) == {"on": "\N{REPLACEMENT CHARACTER} mat"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", {"function": {"name": "läg"}}])
def test_a_tool_must_be_called(serve: Serve, choice: Any, stream: bool) -> None:
    """A random target emits a call, with arguments that satisfy the schema."""
    running = serve()
    running.api.llm.tokenizer.chat_template = CALLING
    tools = [lie({"$ref": "#/$defs/mat"})] + ([TOOL] if choice != "required" else [])
    for seed in range(4):
        got = running.chat(ASKED, tools=tools, tool_choice=choice, seed=seed,
            parallel_tool_calls=False, max_tokens=80, stream=stream,
        )  # fmt: skip
        [*_, last] = [part.choices[0] for part in (got if stream else [got])]
        emitted = last.delta if stream else last.message
        [call] = emitted.tool_calls
        assert (call.function.name, last.finish_reason) == ("läg", "tool_calls")
        assert json.loads(call.function.arguments)["on"] in ("mat", 7)
        assert not emitted.content


FORM: Any = {"enum": ["mat", 7]}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": FORM}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("script", "calls"), [(CALL, 1), (f"{CALL}\n{CALL}", 2), ("7", 0)])
def test_an_answer_with_a_form_or_calls(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, script: str, calls: int, stream: bool
) -> None:
    """The target chooses."""
    running = serve(make_llm(None))
    tokenizer = running.api.llm.tokenizer
    tokenizer.chat_template = CALLING
    say(monkeypatch, [*tokenizer(script)["input_ids"], *[tokenizer.eos_token_id] * 99])
    got = running.chat(ASKED, tools=[lie(FORM), TOOL], response_format=FORMAT, stream=stream)
    choices = [part.choices[0] for part in (got if stream else [got])]
    parts = [choice.delta if stream else choice.message for choice in choices]
    text = "".join(part.content or "" for part in parts)
    called = parts[-1].tool_calls or []
    assert (len(called), choices[-1].finish_reason) == (calls, "tool_calls" if calls else "stop")
    assert not text if calls else json.loads(text) in FORM["enum"]
    for number, call in enumerate(called):
        assert isinstance(json.loads(call.function.arguments), dict)
        assert getattr(call, "index", None) == (number if stream else None)


@pytest.mark.parametrize(
    ("reason", "told"), [("stop", "tool_calls"), ("length", "length"), ("abort", "abort")]
)
def test_an_answer_that_was_cut_after_a_call(llm: LLM, reason: str, told: str) -> None:
    """Its client must know that calls may be missing."""
    request = ended_request(CALL + CALL[:-20])
    request.finish_reason = reason
    whole = ChatBuilder(llm.tokenizer, None, request).whole()
    part = ChatBuilder(llm.tokenizer, None, request).part(request.text.text, [], ended=True)
    assert len(whole.message.tool_calls) == len(part.delta.tool_calls) == 1
    assert whole.finish_reason == part.finish_reason == told


def test_a_form_without_tools_in_its_way(serve: Serve) -> None:
    """Tools that may not be called leave the form alone."""
    running = serve()
    asked: Any = {"tools": [TOOL], "tool_choice": "none", "response_format": FORMAT}
    assert json.loads(running.chat(ASKED, **asked).choices[0].message.content) in FORM["enum"]


def test_a_schema_of_a_tool_that_is_none(serve: Serve) -> None:
    running = serve()
    running.api.llm.tokenizer.chat_template = CALLING
    with pytest.raises(openai.BadRequestError) as raised:
        running.chat(ASKED, tools=[lie({"type": "nothing"})], tool_choice="required")
    assert raised.value.param == "tools"


def test_how_calls_are_written() -> None:
    """The format is the response template's, with its special tokens; any other is refused."""
    tokenizer = make_tokenizer()
    template = {"fields": {"tool_calls": {"open": "<|reserved_0|>", "close": "[END]"}}}
    template["fields"]["tool_calls"] |= {"content": "json", "transform": {"function": "{content}"}}
    tokenizer.response_template = template
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|reserved_0|>"]})
    grammar = str(call_grammar(tokenizer, [TOOL], several=True))
    assert 'start: call ("\\n" call){0,7}\ncall: <[3]> (call0) "[END]"\n' in grammar
    with refused("tools"):
        call_grammar(tokenizer, [{"function": {"name": "sit", "parameters": "no"}}], several=True)
    form = call_grammar(tokenizer, [TOOL], several=False, answer={"type": "object"})
    assert str(form).startswith("start: answer | call\nanswer: %json {")
    template["fields"]["content"] = {"open": "[FINAL]"}
    why = "calls come before what a form constrains, as GPT-OSS writes them"
    assert call_grammar(tokenizer, [TOOL], several=False, answer={"type": "object"}) is None, why
    template["fields"]["tool_calls"]["content"] = "xml-inline"
    with refused("tool_choice"):
        call_grammar(tokenizer, [TOOL], several=True)
    tokenizer.response_template = None
    tokenizer.chat_template = CHATML + "<tool_call><function="
    with refused("tool_choice"):
        call_grammar(tokenizer, [TOOL], several=True)


@pytest.mark.parametrize(
    ("name", "bodies"),
    [
        ("mood", [{}, {"chat_template_kwargs": {"mood": "aaaa"}}]),
        # Clients of GPT-OSS send it.
        ("reasoning_effort", [{"reasoning_effort": f"{how} high"} for how in ("", "very, very")]),
    ],
)
def test_arguments_of_the_template(serve: Serve, name: str, bodies: list[dict[str, Any]]) -> None:
    running = serve()
    running.api.llm.tokenizer.chat_template = f"{{{{ {name} }}}}" + CHATML
    short, long = (running.chat(ASKED, max_tokens=1, extra_body=body).usage for body in bodies)
    assert long.prompt_tokens > short.prompt_tokens


@pytest.mark.parametrize(
    ("template", "effort", "shown"),
    [
        ("{{ enable_thinking }}", "none", "False"),
        ("{{ enable_thinking }}", "high", ""),
        ("{{ reasoning_effort }}", "none", "none"),
        ("", "none", ""),
        ("", "medium", ""),
    ],
)
def test_an_effort_is_ignored_where_the_template_reads_none(
    serve: Serve, template: str, effort: str, shown: str
) -> None:
    """Clients of targets that think send it by default; "none" disables thoughts."""
    running = serve()
    running.api.llm.tokenizer.chat_template = shown + CHATML
    wanted = running.chat(ASKED, max_tokens=1).usage.prompt_tokens
    running.api.llm.tokenizer.chat_template = template + CHATML
    usage = running.chat(ASKED, max_tokens=1, reasoning_effort=effort).usage
    assert usage.prompt_tokens == wanted


def test_a_turn_that_the_template_leaves_out(serve: Serve) -> None:
    """The error names its index; a developer is the system."""
    running = serve()
    loop = "{% for m in messages if m.role in ['system', 'user', 'assistant'] %}"
    running.api.llm.tokenizer.chat_template = CHATML.replace("{% for m in messages %}", loop)
    result = {"role": "tool", "content": "mat", "tool_call_id": "c1"}
    with pytest.raises(openai.BadRequestError) as raised:
        running.chat([*ASKED, result], max_tokens=2)
    assert raised.value.param == "messages[2]"
    system, developer = (
        running.chat([ASKED[0] | {"role": role}, ASKED[1]], max_tokens=2).usage.prompt_tokens
        for role in ("system", "developer")
    )
    assert system == developer


@pytest.mark.parametrize(("kv_tokens", "words"), [(1024, 300), (160, 150)])
def test_answers_before_a_turn_without_room_are_kept(
    serve: Serve, tmp_path: Path, kv_tokens: int, words: int
) -> None:
    """`peagle data regenerate --url` knows by the error that the context, or the KV cache, is too
    small for a turn."""
    running = serve(make_llm(None, kv_tokens=kv_tokens))
    asks = [[{"role": "user", "content": text}] for text in ("the cat", "sat " * words)]
    servers, params = connect([f"{running.url}/v1"]), SamplingParams(max_tokens=8)
    found = regenerate(servers, [Conversation(asks)], tmp_path / "out.jsonl", params)
    assert found == Report(1, 1, 0, [])


def test_what_looks_like_a_call(llm: LLM) -> None:
    """Text is held back only while it may be a call, and nothing is lost."""
    for text in ("a <tool", "a <b", "<tool_call>no json</tool_call>", "x<tool_call>", "plain"):
        own = AnswerParser(llm.tokenizer, [], None)
        deltas = [*map(own.push, text), own.push("", [])]
        assert "".join(delta.content or "" for delta in deltas) == text
        assert not any(delta.tool_calls for delta in deltas)
    own = AnswerParser(llm.tokenizer, [], None)
    assert own.push("a < b").content == "a < b"
    assert own.push("<tool_").content is None
    assert own.push("kit>").content == "<tool_kit>"
    calls = own.push(CALL + CALL, []).tool_calls
    assert [call.function.name for call in calls] == ["sit", "sit"]
    assert all(re.fullmatch("[a-z0-9]{9}", call.id) for call in calls), "as Mistral demands"
    assert len({call.id for call in calls}) == 2
    calls = own.push(CALL[:-20], []).tool_calls
    assert len(calls) == 2, "one that was cut costs no others"


def called(tokenizer: Any, arguments: str) -> Delta:
    """The parsed answer of a call whose arguments are written so."""
    text = f'<tool_call>{{"name": "sit", "arguments": {arguments}}}</tool_call>'
    return AnswerParser(tokenizer, [], None).push(text, [])


# Python reads the last ones.
NO_JSON = ['{"on": NaN}', '{"on": [-Infinity]}', '{"on": 1e999}', '"{\\"on\\": NaN}"']
NO_OBJECT = ['"on a mat"', '"[1]"', "[1]", "7", '"{"', pytest.param("[" * 99_999, id="deep")]


@pytest.mark.parametrize("arguments", [*NO_OBJECT, *NO_JSON])
def test_a_call_without_an_object_of_arguments_is_text(llm: LLM, arguments: str) -> None:
    """No client could read it."""
    delta = called(llm.tokenizer, arguments)
    assert (delta.tool_calls, arguments in str(delta.content)) == ([], True)


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [('""', {}), ('" "', {}), ("null", {}), ('"{\\"on\\": 1}"', {"on": 1})],
)
def test_arguments_that_a_model_writes_as_text(llm: LLM, arguments: str, meant: Any) -> None:
    [call] = called(llm.tokenizer, arguments).tool_calls
    assert json.loads(call.function.arguments) == meant


def test_calls_that_are_demanded_have_an_end(serve: Serve) -> None:
    """A target that would write calls for ever stops at MAX_CALLS; a cut call is dropped."""
    target = make_target(context=2048)
    target.tokenizer.chat_template = CALLING
    running = serve(LLM(target, max_batch=1, kv_tokens=2048))
    [line] = target.tokenizer("\n")["input_ids"]
    nothing = {"type": "object", "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "f", "parameters": nothing}}
    asked: Any = {"tools": [tool], "tool_choice": "required", "temperature": 0}
    create = partial(running.chat, ASKED, **asked, logit_bias={line: 100})
    whole = create()
    assert len(whole.choices[0].message.tool_calls) == MAX_CALLS
    most = whole.usage.completion_tokens
    [choice] = create(max_tokens=most - 9).choices
    cut = choice.message.tool_calls
    assert len(cut) == MAX_CALLS - 1 and {call.function.arguments for call in cut} == {"{}"}
    assert (whole.choices[0].finish_reason, choice.finish_reason) == ("tool_calls", "length")


def test_a_tokenizer_that_parses() -> None:
    """A cut answer, which it cannot parse, is text."""
    tokenizer = make_tokenizer()
    call = {"open": "[CALL]", "close": "[END]", "content": "json", "repeats": True}
    call["transform"] = {"type": "function", "function": "{content}"}
    fields = {"content": {"close": ["<|im_end|>", "[CALL]"]}, "tool_calls": call}
    opening = "<|im_start|>assistant\n"
    tokenizer.response_template = {"start_anchor": opening, "fields": fields}

    def emitted(text: str) -> Delta:
        own = AnswerParser(tokenizer, tokenizer(opening)["input_ids"], None)
        assert own.push(text) == Delta()
        return own.push("", tokenizer(text)["input_ids"])

    parsed = emitted('ok[CALL]{"name": "sit", "arguments": {"on": "mat"}}[END]')
    names = [call.function.name for call in parsed.tool_calls]
    assert (parsed.content, names) == ("ok", ["sit"])
    assert emitted('ok[CALL]{"name": "s') == Delta(content='ok[CALL]{"name": "s')
    for arguments in ('"a mat"', '{"on": NaN}', "[" * 99_999):
        broken = f'ok[CALL]{{"name": "sit", "arguments": {arguments}}}[END]'
        assert emitted(broken) == Delta(content=broken)


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("drafts", ["none", "lookup", "head"])
def test_marks_of_calls_that_are_tokens(serve: Serve, special: bool, drafts: str) -> None:
    """Calls that are demanded are written with these tokens, drafted or not, streamed or not."""
    target = make_target()
    target.tokenizer = with_call_tokens(target.tokenizer, special)
    head = make_drafter(target, "p-eagle") if drafts == "head" else None
    running = serve(LLM(target, head, lookup=drafts != "none", max_batch=2, kv_tokens=1024))
    create = partial(running.chat, ASKED)
    asked: Any = {"tools": [lie({"enum": ["mat"]}), TOOL], "seed": 1, "max_tokens": 150}
    for choice in ("required", {"type": "function", "function": {"name": "läg"}}):
        asked |= {"tool_choice": choice, "parallel_tool_calls": False}
        [whole] = create(**asked).choices
        [call] = whole.message.tool_calls
        assert (whole.message.content, whole.finish_reason) == (None, "tool_calls")
        *_, last = create(**asked, stream=True)
        [streamed], reason = last.choices[0].delta.tool_calls, last.choices[0].finish_reason
        assert (streamed.function.arguments, reason) == (call.function.arguments, "tool_calls")
    two = f"start: {' '.join([in_lark(target.tokenizer, CALL)] * 2)}"
    got = create(tools=[TOOL], max_tokens=150, extra_body={"structured_outputs": {"grammar": two}})
    assert [call.function.name for call in got.choices[0].message.tool_calls] == ["sit", "sit"]
    text = create(max_tokens=20, tools=[TOOL], seed=2, temperature=1)
    assert text.choices[0].message.content is not None, "text is text"
