"""A server under load: 64 streaming clients, a fifth of which leave in their answer's midst.

    python benchmarks/load.py [--seconds 300]

A tiny random target with a head trained for it, deterministic, with fewer places in the queue than
clients and less KV cache than they need. What must hold: no error but 429, nothing kept of
who has gone (blocks, asyncio tasks, open files), memory flat, answers as they are alone. The exit
code says whether it did. No times are measured.
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
from common import RESULTS, environment, write_json

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "tests"), str(HERE.parent / "tests" / "server")]

from serving import Running, make_llm, start, train_head  # noqa: E402

from peagle.engine.llm import LLM  # noqa: E402
from peagle.engine.params import SamplingParams  # noqa: E402

BATCH, QUEUE, KV_TOKENS = 8, 48, 384
CLIENTS, LEAVING = 64, 0.2  # at once; share of requests whose client goes in its midst
CAP = 48  # tokens of an answer, at most
KEPT = 200  # finished requests that are told, a random sample of all
WORDS = ["the", "cat", "sat", "on", "mat", "and", "other", "ran", "to", "hat;", "what", "a day!"]
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 22, 333]}}, "required": ["a"]}
GROWTH = 16  # MiB that resident memory may grow by, from after the warm-up to the end


@dataclass
class Seen:
    """Answers, errors and times that the clients have seen."""

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


def resident() -> float:
    """MiB of this process, which is the server's."""
    return psutil.Process().memory_info().rss / 2**20


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
    """Those that the target alone, one after another, would not have given."""
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
    """The report; its `problems` are empty when all holds."""
    with tempfile.TemporaryDirectory() as folder:
        head = train_head(Path(folder))
    running = start(make_llm(head, BATCH, KV_TOKENS), max_queue=QUEUE)
    with running.http() as http:
        http.get("/health")
    before, memory = held(running), list[float]()
    command = [sys.executable, __file__, "--clients-of", running.url, "--seconds", str(seconds)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as clients:
        while True:
            memory.append(resident())
            try:
                told, _ = clients.communicate(timeout=max(0.5, seconds / 200))
                break
            except subprocess.TimeoutExpired:
                continue
    seen, after = json.loads(told), settled(running, before)
    preempted = running.api.metrics.registry.get_sample_value(
        "vllm:num_preemptions_total", {"model_name": running.api.model}
    )
    running.stop()
    wrong = wrong_answers(make_llm(None), seen["finished"])
    size = -(-len(memory) // 6)
    sixths = [round(median(memory[i : i + size]), 1) for i in range(0, len(memory), size)]
    grown = round(sixths[-1] - sixths[2], 1)  # the first third is the warm-up
    problems = [*seen["errors"], *(f"a wrong answer: {answer}" for answer in wrong)]
    problems += [f"{k}: {after[k]} held, {before[k]} before" for k in after if after[k] > before[k]]
    problems += [f"memory grew by {grown} MiB"] if grown > GROWTH else []
    problems += [f"none {what}" for what in ("finished", "left") if not seen["counts"].get(what)]
    return {
        **environment(), "seconds": seconds, "clients": CLIENTS, "leaving": LEAVING,
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
    parser.add_argument("--output", type=Path, default=RESULTS / "load.json")
    parser.add_argument("--clients-of", metavar="URL", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.clients_of:  # a process of their own, so that the server's memory is its own
        random.seed(0)
        print(json.dumps(vars(asyncio.run(all_clients(args.clients_of, args.seconds)))))
        sys.exit()
    report = run(args.seconds)
    write_json(args.output, report)
    sys.exit("\n".join(report["problems"][:20]) or 0)
