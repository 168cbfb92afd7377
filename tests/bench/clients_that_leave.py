"""A server under load: 64 streaming clients; a fifth of them disconnect during an answer.

    python tests/bench/clients_that_leave.py [--seconds 300]

A tiny random target with a trained head serves in the deterministic mode. Its queue is shorter than
the number of clients, and its KV cache smaller than they need. Requirements: no error but 429; no
blocks, asyncio tasks or open files are left by disconnected clients; constant memory; answers equal
those of single requests. The exit code is 1 if one is not met. No times are measured.
"""

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import httpx2
import psutil

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "server")]

from serving import Running, make_llm, start, train_head  # noqa: E402

from peagle.engine.llm import LLM  # noqa: E402
from peagle.engine.params import SamplingParams  # noqa: E402

BATCH, QUEUE, KV_TOKENS = 8, 48, 384
CLIENTS, LEAVING = 64, 0.2  # at once; share of requests whose client disconnects
MAX_TOKENS = 48  # of an answer
MAX_KEPT = 200  # finished requests that are checked, a random sample
WORDS = ["the", "cat", "sat", "on", "mat", "and", "other", "ran", "to", "hat;", "what", "a day!"]
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 22, 333]}}, "required": ["a"]}
MAX_GROWTH = 16  # MiB of resident memory between the warm-up and the end


@dataclass
class Seen:
    """Counts, errors and finished answers of the clients."""

    counts: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    finished: list[dict[str, Any]] = field(default_factory=list)  # {"body", "text"}

    def keep(self, body: dict[str, Any], text: str) -> None:
        """Count a finished request; each is kept with the same probability."""
        self.counts["finished"] += 1
        if len(self.finished) < MAX_KEPT:
            self.finished.append({"body": body, "text": text})
        elif (index := random.randrange(self.counts["finished"])) < MAX_KEPT:
            self.finished[index] = {"body": body, "text": text}


def some_body() -> dict[str, Any]:
    """A random short request; many have a common prefix."""
    prompt = " ".join(WORDS[: random.randrange(1, 12)] + random.choices(WORDS, k=3))
    body: dict[str, Any] = {
        "prompt": prompt, "stream": True, "max_tokens": random.randrange(1, MAX_TOKENS + 1),
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
    """Send one request; it may disconnect during the answer."""
    body, text, ended = some_body(), "", False
    early = random.randrange(1 + body["max_tokens"] // 3)  # an event may have several tokens
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
    """Send requests until the time is over."""
    while time.monotonic() < until:
        try:
            await ask(http, seen)
        except Exception as error:  # any failure is a finding
            seen.errors.append(f"{type(error).__name__}: {error}")


async def all_clients(url: str, seconds: float) -> Seen:
    """Run all clients at once; requests that have begun are finished."""
    seen, until = Seen(), time.monotonic() + seconds
    limits = httpx2.Limits(max_connections=None)
    async with httpx2.AsyncClient(base_url=url, timeout=60, limits=limits) as http:
        await asyncio.gather(*(client(http, seen, until) for _ in range(CLIENTS)))
    return seen


def held(running: Running) -> dict[str, int]:
    """Resources held by an idle server."""
    scheduler, worker = running.api.llm.engine.scheduler, running.api.worker
    return {
        "blocks": scheduler.pool.count - scheduler.pool.free,
        "requests": worker.open + len(scheduler.running) + len(scheduler.waiting),
        "tasks": len(asyncio.all_tasks(worker._loop)),
        "files": psutil.Process().num_fds(),
    }


def settled(running: Running, before: dict[str, int]) -> dict[str, int]:
    """Resources held after the last client left, which the server notices with a delay."""
    for _ in range(100):
        if (now := held(running)) == before:
            break
        time.sleep(0.1)
    return now


def wrong_answers(llm: LLM, finished: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Finished requests whose text differs from that of the target alone."""
    wrong = []
    for done in finished:
        given = {k: v for k, v in done["body"].items() if not k.startswith(("stream", "prompt"))}
        if form := given.pop("structured_outputs", None):
            given["json_schema"] = form["json"]
        given["stop"] = tuple(given.get("stop", ()))
        [alone] = llm.generate([done["body"]["prompt"]], SamplingParams(**given))
        if alone.text != done["text"]:
            wrong.append(done | {"alone": alone.text})
    return wrong


def run(seconds: float) -> dict[str, Any]:
    """Measure and report; `problems` is empty if all requirements are met."""
    with tempfile.TemporaryDirectory() as folder:
        head = train_head(Path(folder))
    running = start(make_llm(head, BATCH, KV_TOKENS), max_queue=QUEUE)
    with running.http() as http:
        http.get("/health")
    before, memory = held(running), list[float]()
    command = [sys.executable, __file__, "--clients-of", running.url, "--seconds", str(seconds)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as clients:
        while True:
            memory.append(psutil.Process().memory_info().rss / 2**20)  # MiB of the server
            try:
                output, _ = clients.communicate(timeout=max(0.5, seconds / 200))
                break
            except subprocess.TimeoutExpired:
                continue
    seen, after = json.loads(output), settled(running, before)
    preempted = running.api.metrics.registry.get_sample_value(
        "vllm:num_preemptions_total", {"model_name": running.api.config.model}
    )
    running.stop()
    wrong = wrong_answers(make_llm(None), seen["finished"])
    size = -(-len(memory) // 6)
    sixths = [round(median(memory[i : i + size]), 1) for i in range(0, len(memory), size)]
    grown = round(sixths[-1] - sixths[2], 1)  # the first third is the warm-up
    problems = [*seen["errors"], *(f"a wrong answer: {answer}" for answer in wrong)]
    problems += [f"{k}: {after[k]} held, {before[k]} before" for k in after if after[k] > before[k]]
    problems += [f"memory grew by {grown} MiB"] if grown > MAX_GROWTH else []
    problems += [f"none {kind}" for kind in ("finished", "left") if not seen["counts"].get(kind)]
    return {
        "seconds": seconds, "clients": CLIENTS, "leaving": LEAVING,
        "max_batch": BATCH, "max_queue": QUEUE, "kv_tokens": KV_TOKENS, **seen["counts"],
        "errors": len(seen["errors"]), "preempted": int(preempted or 0),
        "checked": len(seen["finished"]), "wrong": len(wrong),
        "held_before": before, "held_after": after,
        "resident_mib": {"in_each_sixth": sixths, "grown": grown},
        "problems": problems,
    }  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--clients-of", metavar="URL", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.clients_of:  # a process of their own, so that the server's memory is its own
        random.seed(0)
        print(json.dumps(vars(asyncio.run(all_clients(args.clients_of, args.seconds)))))
        sys.exit()
    report = run(args.seconds)
    print(json.dumps(report, indent=1))
    sys.exit("\n".join(report["problems"][:20]) or 0)
