"""Bodies that are large, deep, wrong or drawn: each gets an answer, and none a 5xx."""

import json
from typing import Any

import pytest
from serving_alone import Neighbour, Victim

MB = 2**20
POSTS = ("/v1/completions", "/v1/chat/completions", "/invocations", "/peagle/race")
JSON = {"content-type": "application/json"}
USER = {"role": "user", "content": "the cat"}


def many(item: str, size: int) -> str:
    """A list of `item`s of about `size` bytes."""
    return "[" + ",".join([item] * (size // (len(item) + 1))) + "]"


def raw(**fields: str) -> str:
    """A JSON object whose values are JSON already."""
    return "{" + ",".join(f'"{name}":{value}' for name, value in fields.items()) + "}"


A = '"a"'
TALK = json.dumps([USER])
LARGE = {
    "prompts": raw(prompt=many(A, 2 * MB)),
    "lists of one id": raw(prompt=many("[1]", 2 * MB)),
    "ids": raw(prompt=many("1", 2 * MB)),
    "ids after a text": raw(prompt='["a",' + many("1", 2 * MB)[1:]),
    "a text": raw(prompt=json.dumps("the cat " * (MB // 4))),
    "empty messages": raw(messages=many("{}", 2 * MB)),
    "messages": raw(messages=many(json.dumps(USER), 2 * MB)),
    "a long message": raw(messages=json.dumps([USER | {"content": "a" * (2 * MB - 100)}])),
    "tools": raw(messages=TALK, tools=many("{}", 2 * MB)),
    "stops": raw(prompt=A, stop=many(A, 2 * MB)),
    "stop ids": raw(prompt=A, stop_token_ids=many("1", 2 * MB)),
    "biases": raw(prompt=A, logit_bias=json.dumps({str(i): 1 for i in range(150_000)})),
    "unknown lists": raw(prompt="1", x=many("[]", 2 * MB)),
    "a long name": raw(prompt=A, messages=TALK, model=json.dumps("m" * (2 * MB - 100))),
    "names": json.dumps({f"{i:020}": 0 for i in range(70_000)}),
    "digits": raw(prompt=A, messages=TALK, tokens="[0]", max_tokens="9" * 5000),
}


@pytest.mark.parametrize("name", LARGE)
def test_large(victim: Victim, count: Any, name: str) -> None:
    neighbour = Neighbour(victim)
    with neighbour.asking():
        for path in POSTS:
            answer = victim.http.post(path, content=LARGE[name], headers=JSON)
            assert answer.status_code in (200, 400, 404, 413), (path, answer.status_code)
            short = len(answer.content) < 2000
            assert short or answer.status_code == 200, "an error does not repeat the value"
    assert victim.answers() and not neighbour.failures
    count("large bodies", len(POSTS))


@pytest.mark.parametrize("depth", [50, 500, 900, 990, 5000, 200_000])
def test_deep(victim: Victim, count: Any, depth: int) -> None:
    opening, closing = ("[" * depth, "]" * depth) if depth % 20 else ('{"a":' * depth, "}" * depth)
    inside = opening + ("0" if opening[0] == "{" else "") + closing
    for field in ("prompt", "messages", "tools", "x", "chat_template_kwargs", "response_format"):
        body = raw(**{"prompt": A, field: inside})
        for path in POSTS:
            answer = victim.http.post(path, content=body, headers=JSON)
            assert answer.status_code in (200, 400, 413), (path, field, answer.text)
    schema = raw(prompt=A, structured_outputs=raw(json=raw(a=inside)))
    assert victim.http.post(POSTS[0], content=schema, headers=JSON).status_code in (200, 400)
    count("deep bodies", 6 * len(POSTS) + 1)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"null", b"\xff\xfe", b'{"prompt": "\\ud800"}', b'{"prompt": NaN}', b'"a"',
     b'{"prompt": "a", "prompt": "b"}', b"\x00", b"1e999", "{'prompt': 'é'}".encode("latin-1")],
)  # fmt: skip
def test_not_a_body(victim: Victim, count: Any, content: bytes) -> None:
    for path in POSTS:
        for kind in (JSON, {}, {"content-type": "application/json; charset=utf-16"}):
            answer = victim.http.post(path, content=content, headers=kind)
            assert answer.status_code in (200, 400, 404), (path, answer.text)
    count("bodies that are none", 3 * len(POSTS))


def test_memory(victim: Victim, count: Any) -> None:
    """Long prompts are refused before they take memory."""
    before = victim.memory()
    text = "the cat sat on the mat " * (MB // 12)
    for _ in range(4):
        for body in (
            {"prompt": text},
            {"prompt": [text[:10_000]] * 190},
            {"messages": [USER | {"content": text}]},
        ):
            path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
            assert victim.http.post(path, json=body).status_code == 400
    grown = victim.memory() - before
    assert grown < 300 * MB, f"{grown / MB:.0f} MB more"
    count("long prompts", 12)
    count("MB: memory that they left", grown // MB)
