"""Clients of `benchmarks/load.py`: a process of their own, so that the server's memory is its own.

    python benchmarks/load_clients.py URL --seconds 300

Prints one JSON object: what was counted, and some finished requests with what they were told.
"""

import argparse
import asyncio
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx2

CLIENTS, LEAVING = 64, 0.2  # at once; share of requests whose client goes in its midst
CAP = 48  # tokens of an answer, at most
KEPT = 200  # finished requests that are told, a random sample of all
WORDS = ["the", "cat", "sat", "on", "mat", "and", "other", "ran", "to", "hat;", "what", "a day!"]
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 22, 333]}}, "required": ["a"]}


@dataclass
class Seen:
    """What the clients have seen."""

    counts: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    finished: list[dict[str, Any]] = field(default_factory=list)  # {"body", "text"}

    def keep(self, body: dict[str, Any], text: str) -> None:
        """Each finished request has the same chance to be among those kept."""
        self.counts["finished"] += 1
        if len(self.finished) < KEPT:
            self.finished.append({"body": body, "text": text})
        elif (place := random.randrange(self.counts["finished"])) < KEPT:
            self.finished[place] = {"body": body, "text": text}


def some_body() -> dict[str, Any]:
    """A request: many begin alike, and none takes long."""
    prompt = " ".join(WORDS[: random.randrange(1, 12)] + random.choices(WORDS, k=3))
    body: dict[str, Any] = {
        "prompt": prompt, "stream": True, "max_tokens": random.randrange(1, CAP + 1),
        "stream_options": {"include_usage": True}, "seed": random.randrange(2**32),
    }  # fmt: skip
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.9, "top_p": 0.9, "presence_penalty": 0.5},
        {"temperature": 1.0, "top_k": 20, "stop": ["mat"]},
        {"temperature": 0.0, "structured_outputs": {"json": SCHEMA}},
    ]
    return body | random.choice(kinds)


async def ask(http: httpx2.AsyncClient, seen: Seen) -> None:
    """One request, which may be left in its midst."""
    body, text, ended = some_body(), "", False
    early = random.randrange(1 + body["max_tokens"] // 3)  # events: a round may say several tokens
    leave_after = early if random.random() < LEAVING else None
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        if answer.status_code == 429:
            seen.counts["refused"] += 1
            await asyncio.sleep(float(answer.headers["retry-after"]) * random.random())
            return
        if answer.status_code != 200:
            raise RuntimeError(f"{answer.status_code}: {await answer.aread()!r} to {body}")
        events = 0
        async for line in answer.aiter_lines():
            if leave_after is not None and events >= leave_after:
                seen.counts["left"] += 1
                return
            if not line.startswith("data: "):
                continue
            events += 1
            if line == "data: [DONE]":
                ended = True
                continue
            part = json.loads(line.removeprefix("data: "))
            if "error" in part:
                raise RuntimeError(f"{part['error']['message']} to {body}")
            seen.counts["tokens"] += (part["usage"] or {}).get("completion_tokens", 0)
            text += "".join(choice["text"] for choice in part["choices"])
    if not ended:
        raise RuntimeError(f"the answer has no end: {body}")
    seen.keep(body, text)


async def client(http: httpx2.AsyncClient, seen: Seen, until: float) -> None:
    """Asks again and again."""
    while time.monotonic() < until:
        try:
            await ask(http, seen)
        except Exception as error:  # whatever it is, it is what is looked for
            seen.errors.append(f"{type(error).__name__}: {error}")


async def all_clients(url: str, seconds: float) -> Seen:
    """All of them at once; who has asked is answered, so it takes a little longer."""
    seen, until = Seen(), time.monotonic() + seconds
    limits = httpx2.Limits(max_connections=None)
    async with httpx2.AsyncClient(base_url=url, timeout=60, limits=limits) as http:
        await asyncio.gather(*(client(http, seen, until) for _ in range(CLIENTS)))
    return seen


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("--seconds", type=float, required=True)
    args = parser.parse_args()
    random.seed(0)
    print(json.dumps(vars(asyncio.run(all_clients(args.url, args.seconds)))))
