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
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from common import RESULTS, environment, write_json

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "tests"), str(HERE.parent / "tests" / "server")]

from load_clients import CLIENTS, LEAVING  # noqa: E402
from serving import Running, make_llm, start, train_head  # noqa: E402

from peagle.engine.llm import LLM  # noqa: E402
from peagle.engine.params import SamplingParams  # noqa: E402

BATCH, QUEUE, KV_TOKENS = 8, 48, 384
GROWTH = 16  # MiB that resident memory may grow by, from after the warm-up to the end


def resident() -> float:
    """MiB of this process, which is the server's."""
    return psutil.Process().memory_info().rss / 2**20


def held(running: Running) -> dict[str, int]:
    """What a server that does nothing holds."""
    scheduler, worker = running.api.llm.engine.scheduler, running.api.worker
    return {
        "blocks": scheduler.pool.count - scheduler.pool.free,
        "requests": worker.open + len(scheduler.running) + len(scheduler.waiting),
        "tasks": len(asyncio.all_tasks(worker._loop)),
        "files": psutil.Process().num_fds(),
    }


def settled(running: Running, before: dict[str, int]) -> dict[str, int]:
    """What is held when the last have left: the server needs a moment to see that they have."""
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
    command = [sys.executable, HERE / "load_clients.py", running.url, "--seconds", str(seconds)]
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
    args = parser.parse_args()
    report = run(args.seconds)
    write_json(args.output, report)
    sys.exit("\n".join(report["problems"][:20]) or 0)
