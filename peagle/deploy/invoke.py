"""One question to a running deployment: its answer as it comes, its speed, its acceptance."""

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

import httpx2 as httpx

from peagle.deploy.plan import DeployFailed
from peagle.errors import first_line

ROUNDS = "vllm:spec_decode_num_drafts_total"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
STREAM_TIMEOUT = httpx.Timeout(30.0, read=600.0)  # a token may wait in a queue


def question(model: str, prompt: str, max_tokens: int) -> dict[str, Any]:
    """The body of a request whose answer is streamed."""
    return {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def ask(parts: Iterable[bytes], show: Callable[[str], None]) -> str:
    """Show an answer as it comes; return its speed in words. Raises DeployFailed for an error in
    its place."""
    began = time.perf_counter()
    first, tokens = None, 0
    for event in _events(parts):
        if error := event.get("error"):
            why = error.get("message") if isinstance(error, dict) else error
            raise DeployFailed(f"no answer ({why})")
        text = "".join(map(_new_text, event.get("choices") or ()))
        if text and first is None:
            first = time.perf_counter() - began
        show(text)
        tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
    seconds = time.perf_counter() - began
    if first is None:
        raise DeployFailed("no answer (the stream has no text)")
    rate = f"{tokens / seconds:.1f} tokens a second"
    return f"{tokens} tokens in {seconds:.1f} s, the first after {first:.1f} s: {rate}"


def _new_text(choice: dict[str, Any]) -> str:
    """The new text of a streamed choice, reasoning included."""
    delta = choice.get("delta") or {}
    reasoning = delta.get("reasoning_content") or delta.get("reasoning") or ""
    return reasoning + (delta.get("content") or "")


def over_http(url: str, key: str | None, body: dict[str, Any]) -> Iterator[bytes]:
    """The parts of an answer of the server at `url`. Raises DeployFailed."""
    address = f"{_base(url)}/v1/chat/completions"
    sent = httpx.stream("POST", address, json=body, headers=_headers(key), timeout=STREAM_TIMEOUT)
    try:
        with sent as response:
            if not response.is_success:
                text = " ".join(response.read().decode(errors="replace").split())[:300]
                raise DeployFailed(f"HTTP {response.status_code}: {text}")
            yield from response.iter_bytes()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise DeployFailed(f"no answer from {url} ({first_line(error)})") from error


def drafted(url: str, key: str | None) -> tuple[float, float] | None:
    """Rounds with drafts and accepted tokens since a server began; None without such metrics."""
    try:
        answer = httpx.get(f"{_base(url)}/metrics", headers=_headers(key), timeout=30)
        text = answer.raise_for_status().text
    except (httpx.HTTPError, httpx.InvalidURL):
        return None
    found = [re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE)
             for name in (ROUNDS, ACCEPTED)]  # fmt: skip
    rounds, accepted = (sum(map(float, values)) for values in found)
    return (rounds, accepted) if found[0] else None


def acceptance(before: tuple[float, float] | None, after: tuple[float, float] | None) -> str:
    """The acceptance length between two readings, in words."""
    if before is None or after is None:
        return "acceptance not known: the address has no metrics of drafting"
    rounds, accepted = after[0] - before[0], after[1] - before[1]
    return f"acceptance length {1 + accepted / rounds:.2f}" if rounds else "nothing was drafted"


def _base(url: str) -> str:
    """The address of a server, which may be given as a page's or as the API's."""
    return url.rstrip("/").removesuffix("/v1")


def _headers(key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


def _events(parts: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Server-sent events, which parts may cut anywhere; an answer that is none at all is one."""
    rest = b""
    for part in chain(parts, [b"\n"]):
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            data = line.removeprefix(b"data:").strip()
            if data and data != b"[DONE]" and not data.startswith((b":", b"event:")):
                try:
                    yield json.loads(data)
                except ValueError as error:
                    raise DeployFailed(f"no answer ({first_line(error)})") from error
