"""Whatever is wrong is told in OpenAI's form, by field, value and what to do."""

import re
from typing import Any

import openai
import pytest
import torch
from serving import MODEL, Running, Serve, make_llm, start

from peagle.engine import engine
from peagle.engine.grammar import Matcher
from peagle.engine.params import RequestFailure
from peagle.engine.request import Request
from peagle.server.limits import body_limit

USER = {"role": "user", "content": "a"}
LONG = [70] * 256
TOOL = {"type": "function", "function": {"name": "sit"}}

# (body, field, what the message says)
BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"temperature": "hot"}, "temperature", "temperature 'hot': "),
    ({"temperature": -1}, "temperature", "temperature -1.0: must be 0 (greedy) to 100"),
    ({"top_p": 0}, "top_p", "top_p 0.0: must be above 0 and at most 1"),
    ({"top_k": -5}, "top_k", "top_k -5: must be 0 (all) or more"),
    ({"n": 0}, "n", "n 0: "),
    ({"n": 2, "temperature": 0}, "n", "n 2: greedy answers are all the same"),
    ({"n": 100}, "n", "100 answers at once: at most 12"),
    ({"max_tokens": 0}, "max_tokens", "max_tokens 0: must be at least 1"),
    ({"seed": 2**70}, "seed", "seed "),
    ({"stop": ""}, "stop", "stop '': "),
    ({"logit_bias": {"500": 1}}, "logit_bias", "logit_bias 500: the target's token ids are 0 to"),
    ({"logit_bias": {"5": 101}}, "logit_bias", "logit_bias {5: 101.0}: must be -100 to 100"),
    ({"stop_token_ids": [-1]}, "stop_token_ids", "stop_token_ids -1: "),
    ({"presence_penalty": 3}, "presence_penalty", "presence_penalty 3.0: must be -2 to 2"),
    ({"logprobs": 21}, "logprobs", "logprobs 21: "),
    ({"response_format": {"type": "xml"}}, "response_format", "response_format.type 'xml': "),
    ({"response_format": {"type": "json_schema"}}, "response_format", "give one"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs", "regex '(': "),
    ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs", "one form"),
    ({"echo": True}, "echo", "echo True: prompts are not repeated"),
    ({"best_of": 4}, "best_of", "best_of 4: answers are not ranked, use n"),
    ({"suffix": "b"}, "suffix", "suffix 'b': "),
    ({"prompt": ""}, "prompt", "is empty"),
    ({"prompt": []}, "prompt", "is empty"),
    ({"prompt": [[]]}, "prompt[0]", "prompt[0]: is empty"),
    ({"prompt": [500]}, "prompt[0]", "prompt[0] 500: the target's token ids are 0 to 127"),
    ({"prompt": ["a", LONG]}, "prompt", ""),
    ({"prompt": LONG}, "prompt[0]", "prompt[0]: has 256 tokens; tiny-0 takes 256 tokens with the"),
]
BAD += [
    ({name: value}, name, f"{name}: no such field, did you mean {meant}?")
    for name, value, meant in [
        ("temprature", 1, "temperature"),
        ("Temperature", 1, "temperature"),
        ("topP", 0.5, "top_p"),
        ("max_new_tokens", 5, "max_tokens"),
        ("stop_token_id", [1], "stop_token_ids"),
        ("repeat_penalty", 1.1, "repetition_penalty"),
        ("structured_output", {}, "structured_outputs"),
        ("min_token", 4, "min_tokens"),
    ]
]
BAD += [
    ({"stream_options": {"include_usge": True}}, "include_usge", "did you mean include_usage?"),
    ({"max_tokens": 400_000}, "max_tokens", "max_tokens 400000: the context has room for 255 "),
    ({"max_tokens": 256}, "max_tokens", "max_tokens 256: the context has room for 255 tokens"),
]
BAD_CHATS: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": []}, "messages", "messages []: "),
    ({"messages": [{"role": "x", "content": "a"}]}, "messages", "turn with role 'x'"),
    ({"messages": [{"role": "user"}]}, "messages", "a text"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages",
        "messages: 0.content has a part of type 'image_url'",
    ),
    ({"tool_choice": "any"}, "tool_choice", "tool_choice 'any': must be 'auto', 'none', 'req"),
    ({"tool_choice": "required"}, "tool_choice", "not among the tools, there are none"),
    (
        {"tool_choice": {"type": "function", "function": {"name": "run"}}, "tools": [TOOL]},
        "tool_choice",
        "is not among the tools, there are sit",
    ),
    ({"tool_choice": "required", "tools": [{}]}, "tools", 'tools {}: a tool has {"function"'),
    ({"tool_choice": {"name": "sit"}, "tools": [TOOL]}, "tool_choice", 'tool_choice {"name": "'),
    (
        {"tool_choice": "required", "tools": [TOOL], "structured_outputs": {"regex": "a"}},
        "tool_choice",
        "tool_choice: an answer has one form",
    ),
    (
        {"tool_choice": "required", "tools": [TOOL]},
        "tool_choice",
        "how this target writes tool calls is not known to us",
    ),
    ({"top_logprobs": 99}, "top_logprobs", "top_logprobs 99: "),
    ({"functions": [{}]}, "functions", "functions [{}]: deprecated, use tools"),
    ({"chat_template": "x"}, "chat_template", "it is chosen when the server starts"),
    (
        {"chat_template_kwargs": {"tokenize": True}},
        "chat_template_kwargs",
        "chat_template_kwargs tokenize: the chat template reads no such name",
    ),
    ({"messages": [{"role": "user", "content": "a " * 300}]}, "messages", "takes 256"),
    ({"message": [USER]}, "message", "message: no such field, did you mean messages?"),
    ({"reasoning_efort": "low"}, "reasoning_efort", "did you mean reasoning_effort?"),
    (
        {"max_completion_tokens": 10**9},
        "max_completion_tokens",
        "max_completion_tokens 1000000000: the context has room for ",
    ),
]


@pytest.fixture(scope="module")
def small(drafter: Any) -> Any:
    started = start(make_llm(drafter), max_queue=8)
    yield started
    started.stop()


def refused(running: Running, path: str, body: Any, status: int = 400) -> dict[str, Any]:
    with running.http() as http:
        answer = http.post(path, json=body)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize(("body", "field", "said"), BAD, ids=[str(list(b[0])[0]) for b in BAD])
def test_bad_completions(small: Running, body: Any, field: str, said: str) -> None:
    error = refused(small, "/v1/completions", {"prompt": "a", "max_tokens": 4} | body)
    assert (error["param"], error["type"]) == (field, "invalid_request_error")
    assert said in error["message"]


@pytest.mark.parametrize(("body", "field", "said"), BAD_CHATS)
def test_bad_chats(small: Running, body: Any, field: str, said: str) -> None:
    error = refused(small, "/v1/chat/completions", {"messages": [USER], "max_tokens": 4} | body)
    assert error["param"] == field and said in error["message"]


def test_nothing_runs_on(small: Running) -> None:
    """Of what was refused, in part or whole."""
    scheduler = small.api.llm.engine.scheduler
    assert small.api.worker.open == 0 and small.api.llm.engine.idle
    assert scheduler.pool.free == scheduler.pool.count


@pytest.mark.parametrize("harmless", [{"echo": False}, {"best_of": 1}, {"suffix": None}])
def test_what_asks_for_nothing_is_no_error(running: Running, harmless: dict[str, Any]) -> None:
    body = {"prompt": "a", "max_tokens": 1, "user": "me", "temperature": None} | harmless
    with running.http() as http:
        assert http.post("/v1/completions", json=body).status_code == 200


def test_fields_that_clients_send_are_no_error(running: Running) -> None:
    """What is no other field's name, and changes nothing here; null is as good as nothing."""
    more = {"user": "me", "store": True, "metadata": {"a": "b"}, "service_tier": "auto"}
    more |= {"prompt_cache_key": "k", "safety_identifier": "s", "verbosity": "low", "some_new": 1}
    more |= {"prediction": {}, "add_special_tokens": True, "cache_salt": "x", "temprature": None}
    more |= {"parallel_tool_calls": False, "thinking": {}, "x" * 5000: 1}
    with running.http() as http:
        body = {"prompt": "a", "messages": [USER], "max_tokens": 1} | more
        for path in ("/v1/completions", "/v1/chat/completions", "/invocations"):
            assert http.post(path, json=body).status_code == 200


def test_an_answer_may_fill_the_context(running: Running) -> None:
    body = {"prompt": [70] * 250, "ignore_eos": True}
    with running.http() as http:
        for more in ({"max_tokens": 6}, {"max_tokens": None}, {}):
            answer = http.post("/v1/completions", json=body | more).json()
            assert answer["usage"]["completion_tokens"] == 6


def test_bodies_that_are_none(running: Running) -> None:
    with running.http() as http:
        for content, said in (
            ("{", "the body is not JSON"),
            ("[]", "the body must be a JSON object"),
            ("", "the body must be a JSON object"),
            ('{"prompt": "\\ud800"}', "half of a character"),
            ('{"prompt": "a", "top_p": NaN}', "top_p nan"),
        ):
            for path in ("/v1/completions", "/invocations"):
                json_type = {"content-type": "application/json"}
                answer = http.post(path, content=content, headers=json_type)
                assert answer.status_code == 400, content
                assert said in answer.json()["error"]["message"]
        form = http.post("/v1/completions", content='{"prompt": "a"}')
        assert "content-type application/json" in form.json()["error"]["message"]


def test_routes_that_are_not(running: Running) -> None:
    with running.http() as http:
        for answer, status in ((http.get("/nope"), 404), (http.get("/v1/completions"), 405)):
            assert answer.status_code == status
            assert "no such route, there are" in answer.json()["error"]["message"]


def test_another_model(running: Running) -> None:
    with pytest.raises(openai.NotFoundError, match=f"'gpt-9': not served here, there is '{MODEL}'"):
        running.client().completions.create(model="gpt-9", prompt="a")


def test_too_large(running: Running) -> None:
    limit = body_limit(running.api.context)
    error = refused(running, "/v1/completions", {"prompt": "a" * limit}, 413)
    assert str(limit) in error["message"]

    def chunks() -> Any:
        for _ in range(limit // 2**20 + 1):
            yield b"a" * 2**20

    with running.http() as http:  # without a content-length
        json_type = {"content-type": "application/json"}
        assert http.post("/tokenize", content=chunks(), headers=json_type).status_code == 413


def test_keys(serve: Serve) -> None:
    running = serve(api_key="schlüssel")
    for key in ("wrong", ""):
        headers = {"authorization": f"Bearer {key}"} if key else {}
        with running.http() as http:
            for path in ("/v1/models", "/metrics", "/nope"):
                answer = http.get(path, headers=headers)
                assert answer.status_code == 401
                assert answer.json()["error"]["code"] == "invalid_api_key"
            assert http.get("/health").status_code == http.get("/ping").status_code == 200
    with running.http() as http:
        right = {"authorization": "Bearer schlüssel".encode()}
        assert http.get("/v1/models", headers=right).status_code == 200
    with pytest.raises(openai.AuthenticationError):
        running.client("other").completions.create(model=MODEL, prompt="a")


def test_no_browser_is_let_in(running: Running) -> None:
    with running.http() as http:
        asked = {"origin": "http://evil.example", "access-control-request-method": "POST"}
        answer = http.options("/v1/completions", headers=asked)
        assert answer.status_code == 405
        assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_fails_alone(
    running: Running, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    accept = engine.accept

    def failing(request: Request, *rest: Any) -> list[int]:
        if request.params.top_k == 77:
            raise RequestFailure("the logits are no numbers")
        return accept(request, *rest)

    monkeypatch.setattr(engine, "accept", failing)
    client = running.client()
    with pytest.raises(openai.APIError, match="the logits are no numbers") as raised:
        list(
            client.completions.create(
                model=MODEL, prompt="a", extra_body={"top_k": 77}, stream=stream
            )
        )
    assert isinstance(raised.value, openai.InternalServerError) != stream
    assert client.completions.create(model=MODEL, prompt="a").choices


@pytest.mark.parametrize("stream", [False, True])
def test_a_form_that_is_too_complex(running: Running, stream: bool) -> None:
    """Where llguidance gives up in the answer's midst, it is the request that was wrong."""
    many = {"grammar": "start: " + " | ".join(f'"{"x" * 50}{i}"' for i in range(3000))}
    body = {"prompt": "a", "stream": stream, "structured_outputs": many}
    with running.http() as http:
        answer = http.post("/v1/completions", json=body)
    assert answer.status_code == (200 if stream else 400)
    assert "the grammar cannot be followed any further" in answer.text
    assert "invalid_request_error" in answer.text
    assert re.search(r'"param": ?"structured_outputs"', answer.text)


@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_breaks_is_no_fault_of_the_client(
    running: Running, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """Its mask allows a token that it then refuses: that request fails, with 500."""
    monkeypatch.setattr(Matcher, "allowed", lambda self: torch.ones(self.vocabulary).bool())
    body = {"prompt": "a", "stream": stream, "structured_outputs": {"regex": "[0-9]{40}"}}
    with running.http() as http:
        answer = http.post("/v1/completions", json=body)
    assert answer.status_code == (200 if stream else 500)
    assert "server_error" in answer.text and "the grammar refuses a token" in answer.text
    assert running.client().completions.create(model=MODEL, prompt="a").choices


def test_thousands_of_choices(running: Running) -> None:
    """They are one terminal: rules of so many alternatives are what llguidance gives up on."""
    choices = [f"cat {i}" for i in range(5000)]
    body = {"prompt": "a", "max_tokens": 30, "structured_outputs": {"choice": choices}}
    with running.http() as http:
        answer = http.post("/v1/completions", json=body).json()
    assert answer["choices"][0]["text"] in choices
