"""Errors have OpenAI's form: `param` names the field, the message the value and the fix."""

import json
import re
from typing import Any

import openai
import pytest
import torch
from refusals import check_text
from serving import MODEL, Running, Serve, all_free, make_llm, start
from tiny import make_target
from tokenizers import decoders

from peagle.engine import engine
from peagle.engine.grammar import Matcher
from peagle.engine.llm import LLM
from peagle.engine.params import RequestFailure
from peagle.engine.request import Request
from peagle.server.middleware import BODY_BYTES, BODY_BYTES_PER_TOKEN

JSON = {"content-type": "application/json"}
USER = {"role": "user", "content": "a"}
LONG = [70] * 256
TOOL = {"type": "function", "function": {"name": "sit"}}

# (body, field)
BAD: list[tuple[dict[str, Any], str]] = [
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": -1}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": -5}, "top_k"),
    ({"n": 0}, "n"),
    ({"n": 2, "temperature": 0}, "n"),
    ({"n": 100}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 256}, "max_tokens"),
    ({"max_tokens": 400_000}, "max_tokens"),
    ({"seed": 2**70}, "seed"),
    ({"stop": ""}, "stop"),
    ({"logit_bias": {"500": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"logprobs": 21}, "logprobs"),
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {"json_schema": {"schema": {}}}}, "response_format"),
    ({"response_format": {"type": "text", "json_schema": {"schema": {}}}}, "response_format"),
    ({"response_format": {"type": "json_object", "json_schema": {"schema": {}}}},
     "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 3}}}},
     "response_format"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
    ({"structured_outputs": {"json": {"type": 3}}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs"),
    ({"ignore_eos": True, "structured_outputs": {"regex": "a"}}, "ignore_eos"),
    ({"structured_outputs": {"structural_tag": {}}}, "structural_tag"),
    ({"structured_outputs": {"json": {}, "whitespace_pattern": " "}}, "whitespace_pattern"),
    ({"structured_outputs": {"json": {}, "disable_any_whitespace": True}},
     "disable_any_whitespace"),
    ({"structured_outputs": {"json": {}, "disable_additional_properties": True}},
     "disable_additional_properties"),
    ({"stream_options": {"peagle_drafts": True}}, "stream_options"),
    ({"add_special_tokens": False}, "add_special_tokens"),
    ({"prompt_embeds": "AA=="}, "prompt_embeds"),
    ({"logprob_token_ids": [70]}, "logprob_token_ids"),
    ({"return_token_ids": True}, "return_token_ids"),
    ({"return_tokens_as_token_ids": True}, "return_tokens_as_token_ids"),
    ({"repetition_detection": {"max_pattern_size": 2}}, "repetition_detection"),
    ({"thinking_token_budget": 9}, "thinking_token_budget"),
    ({"echo": True}, "echo"),
    ({"best_of": 4}, "best_of"),
    ({"suffix": "b"}, "suffix"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": ["a"] * 20}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [500]}, "prompt"),
    ({"prompt": ["a", LONG]}, "prompt"),
    ({"prompt": LONG}, "prompt"),
    ({"prompt": "\ud800"}, "prompt"),
    ({"\ud800": 1}, r"\ud800"),
    ({"stream_options": {"include_usge": True}}, "include_usge"),
]  # fmt: skip
MISSPELLED = {
    "temprature": (1, "temperature"),
    "Temperature": (1, "temperature"),
    "topP": (0.5, "top_p"),
    "max_new_tokens": (5, "max_tokens"),
    "stop_token_id": ([1], "stop_token_ids"),
    "repeat_penalty": (1.1, "repetition_penalty"),
    "structured_output": ({}, "structured_outputs"),
    "min_token": (4, "min_tokens"),
}
BAD_CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "x", "content": "a"}]}, "messages[0]"),
    ({"messages": [{"role": "user"}]}, "messages[0]"),
    ({"messages": [USER, {"role": "user", "content": [{"type": "image_url"}]}]}, "messages[1]"),
    ({"messages": [{"role": "user", "content": "a " * 300}]}, "messages"),
    ({"tool_choice": "any"}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"function": {"name": "run"}}, "tools": [TOOL]}, "tool_choice"),
    ({"tool_choice": "required", "tools": [{}]}, "tools"),
    ({"tool_choice": {"name": "sit"}, "tools": [TOOL]}, "tool_choice"),
    ({"tool_choice": "required", "tools": [TOOL], "structured_outputs": {"regex": "a"}},
     "tool_choice"),
    ({"tool_choice": "required", "tools": [TOOL]}, "tool_choice"),  # an unknown format of calls
    ({"response_format": {"type": "json_object"}, "tools": [TOOL]}, "response_format"),  # the same
    ({"top_logprobs": 99}, "top_logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"documents": [{"text": "a"}]}, "documents"),
    ({"add_special_tokens": True}, "add_special_tokens"),
    ({"functions": [{}]}, "functions"),
    ({"chat_template": "x"}, "chat_template"),
    ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
    ({"message": [USER]}, "message"),
    ({"reasoning_efort": "low"}, "reasoning_efort"),
    ({"max_completion_tokens": 10**9}, "max_completion_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
]  # fmt: skip


@pytest.fixture(scope="module")
def small(drafter: Any) -> Any:
    started = start(make_llm(drafter), max_queue=8)
    yield started
    started.stop()


def refused(running: Running, path: str, body: Any, status: int = 400) -> dict[str, Any]:
    answer = running.post(path, content=json.dumps(body), headers=JSON)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    check_text(error["message"])
    return error


@pytest.mark.parametrize(("body", "field"), BAD)
def test_bad_completions(small: Running, body: Any, field: str) -> None:
    error = refused(small, "/v1/completions", {"prompt": "a", "max_tokens": 4} | body)
    assert (error["param"], error["type"]) == (field, "invalid_request_error")
    assert error["message"].startswith(field)


@pytest.mark.parametrize(("name", "value", "meant"), [(n, *v) for n, v in MISSPELLED.items()])
def test_misspelled_names(small: Running, name: str, value: Any, meant: str) -> None:
    error = refused(small, "/v1/completions", {"prompt": "a", name: value})
    assert error["param"] == name and f"{meant}?" in error["message"]


@pytest.mark.parametrize(("body", "field"), BAD_CHATS)
def test_bad_chats(small: Running, body: Any, field: str) -> None:
    error = refused(small, "/v1/chat/completions", {"messages": [USER], "max_tokens": 4} | body)
    assert error["param"] == field


def test_a_field_inside_another_that_is_missing(small: Running) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x"}}
    error = refused(small, "/v1/completions", {"prompt": "a", "response_format": form})
    assert error["param"] == "response_format"
    assert error["message"].startswith("response_format.json_schema.schema: is missing")


def test_a_prompt_that_no_cache_holds(serve: Serve) -> None:
    """The error has its number, however many answers each prompt gets."""
    running = serve(make_llm(None, kv_tokens=96))
    error = refused(running, "/v1/completions", {"prompt": [[70], [70] * 60], "n": 2})
    assert error["param"] == "prompt[1]"


def test_nothing_runs_on(small: Running) -> None:
    """Refused requests leave nothing behind."""
    assert all_free(small)


def test_fields_that_clients_send_are_no_error(running: Running) -> None:
    """Unknown fields are ignored, unless they are near to a known one; null counts as left out, as
    do unsupported ones that ask for nothing."""
    more = {"user": "me", "store": True, "metadata": {"a": "b"}, "service_tier": "auto"}
    more |= {"prompt_cache_key": "k", "safety_identifier": "s", "verbosity": "low", "some_new": 1}
    more |= {"prediction": {}, "cache_salt": "x", "temprature": None}
    more |= {"parallel_tool_calls": False, "thinking": {}, "x" * 5000: 1, "temperature": None}
    more |= {"echo": False, "best_of": 1, "suffix": None, "documents": []}
    more |= {"parse_tool_calls": True, "reasoning_format": "auto"}
    more |= {"structured_outputs": {"disable_any_whitespace": False, "whitespace_pattern": None}}
    body = {"prompt": "a", "messages": [USER], "max_tokens": 1} | more
    for path in ("/v1/completions", "/v1/chat/completions", "/invocations"):
        own = {"add_special_tokens": path == "/v1/completions"}
        assert running.post(path, json=body | own).status_code == 200


def test_an_answer_may_fill_the_context(running: Running) -> None:
    body = {"prompt": [70] * 250, "ignore_eos": True}
    for more in ({"max_tokens": 6}, {"max_tokens": None}, {}):
        answer = running.post("/v1/completions", json=body | more).json()
        assert answer["usage"]["completion_tokens"] == 6


def test_bodies_that_are_none(running: Running) -> None:
    for content, said in (
        ("{", "the body is not JSON"),
        ("[]", "the body must be a JSON object"),
        ("", "the body must be a JSON object"),
        ('{"prompt": "a", "top_p": NaN}', "top_p nan"),
    ):
        for path in ("/v1/completions", "/invocations"):
            answer = running.post(path, content=content, headers=JSON)
            assert answer.status_code == 400, content
            assert said in answer.json()["error"]["message"]
    form = running.post("/v1/completions", content='{"prompt": "a"}')
    assert "content-type application/json" in form.json()["error"]["message"]


def test_routes_that_are_not(running: Running) -> None:
    assert "usage.prompt_tokens" in running.post("/tokenize").json()["error"]["message"]
    for path, status in (("/nope", 404), ("/v1/completions", 405)):
        answer = running.get(path)
        assert answer.status_code == status
        assert "no such route, there are" in answer.json()["error"]["message"]


def test_another_model(running: Running) -> None:
    error = refused(running, "/v1/completions", {"model": "gpt-9", "prompt": "a"}, 404)
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert MODEL in error["message"]


def test_too_large(running: Running) -> None:
    limit = BODY_BYTES + BODY_BYTES_PER_TOKEN * running.api.context
    error = refused(running, "/v1/completions", {"prompt": "a" * limit}, 413)
    assert str(limit) in error["message"]

    def chunks() -> Any:
        for _ in range(limit // 2**20 + 1):
            yield b"a" * 2**20

    unmeasured = running.post("/v1/completions", content=chunks(), headers=JSON)
    assert unmeasured.status_code == 413, "without a content-length"


def test_keys(serve: Serve) -> None:
    running = serve(api_key="schlüssel")
    for key in ("wrong", ""):
        headers = {"authorization": f"Bearer {key}"} if key else {}
        for path in ("/v1/models", "/metrics", "/invocations", "/nope"):
            answer = running.get(path, headers=headers)
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
    assert running.get("/health").status_code == running.get("/ping").status_code == 200
    right = {"authorization": "Bearer schlüssel".encode()}
    assert running.get("/v1/models", headers=right).status_code == 200
    with pytest.raises(openai.AuthenticationError):
        running.client("other").completions.create(model=MODEL, prompt="a")


def test_no_browser_is_let_in(running: Running) -> None:
    with running.http() as http:
        asked = {"origin": "http://evil.example", "access-control-request-method": "POST"}
        answer = http.options("/v1/completions", headers=asked)
        assert answer.status_code == 405
        assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize("stream", [False, True])
def test_one_fails_alone(running: Running, monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    accept = engine.accept

    def failing(request: Request, *rest: Any) -> list[int]:
        if request.params.top_k == 77:
            raise RequestFailure("the logits are no numbers")
        return accept(request, *rest)

    monkeypatch.setattr(engine, "accept", failing)
    with pytest.raises(openai.APIError, match="the logits are no numbers") as raised:
        list(running.complete("a", extra_body={"top_k": 77}, stream=stream))
    assert isinstance(raised.value, openai.InternalServerError) != stream
    assert running.complete("a").choices


@pytest.mark.parametrize("stream", [False, True])
def test_a_form_that_is_too_complex(running: Running, stream: bool) -> None:
    """A grammar that exceeds llguidance's limits in the middle of an answer gets 400."""
    many = {"grammar": "start: " + " | ".join(f'"{"x" * 50}{i}"' for i in range(3000))}
    body = {"prompt": "a", "stream": stream, "structured_outputs": many}
    answer = running.post("/v1/completions", json=body)
    assert answer.status_code == (200 if stream else 400)
    assert "the grammar cannot be followed any further" in answer.text
    assert "invalid_request_error" in answer.text
    assert re.search(r'"param": ?"structured_outputs"', answer.text)


@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_breaks_is_no_fault_of_the_client(
    running: Running, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """Its mask allows a token that it then refuses: that request fails, with 500."""
    refused = torch.arange(128) == 70  # a letter
    monkeypatch.setattr(Matcher, "allowed", lambda self: refused)
    body = {"prompt": "a", "stream": stream, "structured_outputs": {"regex": "[0-9]{40}"}}
    answer = running.post("/v1/completions", json=body)
    assert answer.status_code == (200 if stream else 500)
    assert "server_error" in answer.text and "the grammar refuses a token" in answer.text
    assert running.complete("a").choices


def test_a_target_that_can_follow_no_grammar(serve: Serve) -> None:
    """Its server starts and answers what has none."""
    target = make_target()
    target.tokenizer.backend_tokenizer.decoder = decoders.Metaspace()
    running = serve(LLM(target, max_batch=2, kv_tokens=1024))
    body = {"prompt": "a", "structured_outputs": {"regex": "a"}}
    assert "cannot follow grammars" in refused(running, "/v1/completions", body)["message"]
    assert running.complete("a", max_tokens=2).choices


def test_thousands_of_choices(running: Running) -> None:
    """Choices become one terminal: llguidance refuses rules with so many alternatives."""
    choices = [f"cat {i}" for i in range(5000)]
    body = {"prompt": "a", "max_tokens": 30, "structured_outputs": {"choice": choices}}
    answer = running.post("/v1/completions", json=body).json()
    assert answer["choices"][0]["text"] in choices
