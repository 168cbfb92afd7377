"""Races: the same tokens in every lane, and a server that goes on as if there had been none."""

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import yaml
from serving import Brake, Running, Serve, all_free, until
from test_console import streamed
from test_metrics import read
from tiny import make_drafter, make_target, save_target

from peagle.backends.cpu import target as cpu_target
from peagle.catalog import Entry, known_entry
from peagle.engine.llm import LLM
from peagle.engine.params import SamplingParams
from peagle.model.described import DescribedTarget
from peagle.model.drafter import Drafter
from peagle.server import console
from peagle.server.conversations import conversation_ids
from peagle.server.worker import ENDING

LANES = ["Target alone", "EAGLE-3", "EAGLE-3 + lookup", "P-EAGLE"]
TREES = "adaptive + lookup"
RACE = {"messages": [{"role": "user", "content": "the cat sat"}], "max_tokens": 24}


@pytest.fixture(autouse=True)
def known(catalog: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEAGLE_CATALOG", str(catalog))


def race(running: Running, **more: Any) -> list[dict[str, Any]]:
    return streamed(running.post("/peagle/race", json=RACE | more))


def played(llm: LLM, ids: list[int], tokens: int) -> list[dict[str, Any]]:
    """The events of a race without a server."""
    made = console.Console(llm, None)
    return [event for event in made.steps(made.lanes(), ids, tokens) if event]


def test_the_lanes(serve: Serve, llm: LLM) -> None:
    running = serve()
    first, *rounds, verdict = race(running)
    assert [lane["title"] for lane in first["lanes"]] == LANES
    assert [lane["drafts"] for lane in first["lanes"]] == ["", "K = 3", TREES, "K = 3"]
    assert not any(lane["missing"] for lane in first["lanes"])
    ids = conversation_ids(llm, RACE["messages"], [], {})
    wanted = llm.generate([ids], SamplingParams(max_tokens=24))[0]
    assert verdict == {"identical": True, "same_tokens": len(wanted.token_ids)}
    for lane in range(4):
        own = [event for event in rounds if event["lane"] == lane]
        times = [event["at"] for event in own]
        assert times == sorted(times) and [e["ended"] for e in own[:-1]] == [False] * len(own[1:])
        text = "".join(piece["text"] for event in own for piece in event["pieces"])
        last = own[-1]
        assert text == wanted.text and last["ended"] and last["tokens"] == len(wanted.token_ids)
        places = {piece["place"] for event in own for piece in event["pieces"]}
        assert (
            (last["accepted"] > 0) == (max(places) > 0) == (last["forwards"] < last["tokens"] - 1)
        )
        if lane != 2:
            nodes = last["drafted"] / max(1, last["rounds"])
            assert nodes == pytest.approx(3 if lane else 0, abs=0.5)


@pytest.mark.parametrize(
    ("served", "options", "wanted"),
    [
        ("p-eagle", {}, [TREES, TREES]),
        ("p-eagle", {"lookup": False}, [TREES, "adaptive"]),
        ("p-eagle", {"nodes": 9}, ["9 nodes + lookup", "9 nodes + lookup"]),
        ("p-eagle", {"nodes": 9, "lookup": False}, ["9 nodes + lookup", "9 nodes"]),
        ("none", {"lookup": False}, [TREES, TREES]),
        ("lookup", {}, [TREES, TREES, "adaptive"]),
    ],
)
def test_lanes_draft_as_the_server(
    drafter: Drafter, served: str, options: dict[str, Any], wanted: list[str]
) -> None:
    """With its options, where a method can; all the same tokens."""
    llm = LLM(make_target(), drafter if served == "p-eagle" else None, **options)
    first, *rounds, verdict = played(llm, [60 + i % 7 for i in range(40)], 16)
    lanes = first["lanes"]
    assert [lane["title"] for lane in lanes] == [*LANES, "Lookup"][: 2 + len(wanted)]
    assert [lane["drafts"] for lane in lanes] == ["", "adaptive", *wanted]
    assert verdict == {"identical": True, "same_tokens": 16}
    last = [event for event in rounds if event["ended"]]
    assert (last[0]["drafted"], last[0]["forwards"]) == (0, 15)
    if "nodes" in options:
        nodes = last[3]["drafted"] / last[3]["rounds"]
        assert nodes > 3, "a tree has more nodes than the head has places"


def test_nothing_is_left_of_it(serve: Serve, drafter: Drafter) -> None:
    """The engine, its cache, its target's mode, and every number at /metrics."""
    running = serve(LLM(make_target(), drafter, k=2, max_batch=4, kv_tokens=1024))
    ask = partial(running.complete, [60 + i for i in range(40)], max_tokens=9, temperature=0)
    before_text, target = ask().choices[0].text, running.api.llm.target
    engine, before = running.api.llm.engine, read(running)
    state = target.config._experts_implementation, target.config._attn_implementation
    assert race(running)[-1]["identical"]
    assert running.api.llm.engine is engine is running.api.worker._engine
    assert read(running) == before and all_free(running)
    again = ask()
    assert again.choices[0].text == before_text
    assert (target.config._experts_implementation, target.config._attn_implementation) == state
    assert again.usage is not None and again.usage.prompt_tokens_details is not None
    assert again.usage.prompt_tokens_details.cached_tokens == 32, "the prefix is still known"


@pytest.mark.parametrize("method", ["none", "lookup", "p-eagle"])
def test_lanes_without_a_head(
    drafter: Drafter, monkeypatch: pytest.MonkeyPatch, method: str, tmp_path: Path
) -> None:
    """Each lane tells why; the others race. No catalog knows the target, or a head is elsewhere."""
    heads = {"eagle3": {"hub": "owner/head", "k": 3}, "p-eagle": {"folder": "gone", "k": 3}}
    for file, told in {None: "no EAGLE-3 head", "other.yaml": "owner/head is on the hub"}.items():
        monkeypatch.delenv("PEAGLE_CATALOG", raising=False)
        if file is not None:
            entry = {"target": "owner/tiny", "heads": heads}
            (tmp_path / file).write_text(yaml.safe_dump({make_target().name: entry}))
            monkeypatch.setenv("PEAGLE_CATALOG", str(tmp_path / file))
        head = drafter if method == "p-eagle" else None
        llm = LLM(make_target(), head, lookup=method == "lookup", max_batch=4)
        first, *rounds, verdict = played(llm, [60, 61, 62], 8)
        missing = [lane["missing"] for lane in first["lanes"]]
        assert told in missing[1] and missing[1] == missing[2]
        assert bool(missing[3]) == (method != "p-eagle")
        run = {event["lane"] for event in rounds}
        assert run == {number for number, why in enumerate(missing) if why is None}
        assert verdict["identical"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_described_target_lends_its_weights(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, dtype: str
) -> None:
    """Native code is deterministic as it is served, so nothing is laid out again."""
    head = make_drafter(make_target(), "p-eagle").to(getattr(torch, dtype))
    laid_out = Mock(wraps=cpu_target.quantize_weights)
    monkeypatch.setattr(cpu_target, "quantize_weights", laid_out)
    folder = str(save_target(make_target(), tmp_path))
    llm = LLM(folder, head, nodes=8, dtype=dtype, device="cpu")
    assert isinstance(llm.target, DescribedTarget)
    served = laid_out.call_count
    *_, verdict = played(llm, [60 + i % 7 for i in range(40)], 16)
    assert verdict == {"identical": True, "same_tokens": 16}
    assert laid_out.call_count == served > 0


def test_a_step_is_one_round(llm: LLM, brake: Brake) -> None:
    """Those that warm up, too: other requests go on in between."""
    made = console.Console(llm, None)
    before = brake.steps
    for _ in made.steps(made.lanes(), [60 + i % 7 for i in range(100)], 8):
        assert brake.steps - before <= 1
        before = brake.steps


def test_no_catalog_is_read_between_rounds(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other requests would wait for it."""
    threads = list[str]()

    def known(name: str) -> Entry | None:
        threads.append(threading.current_thread().name)
        return known_entry(name)

    monkeypatch.setattr(console, "known_entry", known)
    assert race(serve())[-1]["identical"]
    assert threads and "engine" not in threads


def test_others_go_on(serve: Serve, brake: Brake) -> None:
    """Other requests are answered between a race's rounds; a second race is refused."""
    running = serve()
    with running.http() as http, http.stream("POST", "/peagle/race", json=RACE) as response:
        lines = response.iter_lines()
        assert "lanes" in next(lines)
        second = race(running)
        assert "a race is on" in second[0]["error"]["message"]
        assert running.complete("a", max_tokens=5).choices
        assert '"identical":true' in "".join(lines).replace(" ", "")


def test_leaving_ends_it(serve: Serve, brake: Brake) -> None:
    """No round follows. The target alone would take one for each of 24 tokens."""
    running = serve()
    posted = running.api.worker._posted
    brake.go.clear()
    with running.http() as http, http.stream("POST", "/peagle/race", json=RACE) as response:
        lines = response.iter_lines()  # kept: without it the client leaves
        assert "lanes" in next(lines)
        until(lambda: posted.qsize() == 1)  # the first round
    until(lambda: posted.qsize() == 2)  # and the end
    before = brake.steps
    brake.go.set()
    assert running.complete("a", max_tokens=3).choices
    assert brake.steps - before < 10
    assert race(running)[-1]["identical"]


@pytest.mark.parametrize("times", [1, 2])
def test_told_to_end(serve: Serve, brake: Brake, times: int) -> None:
    """The race is cut short, and the server ends."""
    running = serve()
    brake.go.clear()
    with running.http() as http, http.stream("POST", "/peagle/race", json=RACE) as response:
        lines = response.iter_lines()
        assert "lanes" in next(lines)
        for _ in range(times):
            running.server.handle_exit(15, None)
        brake.go.set()
        rest = "".join(lines)
        assert "[DONE]" in rest and "identical" not in rest
    running.thread.join(30)
    assert not running.thread.is_alive() and not running.api.worker.failed


def test_it_ends_with_the_engine(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine fails while the race waits for its next round."""
    running, gate = serve(), threading.Event()
    posted = running.api.worker._posted

    def broken() -> None:
        gate.wait(30)
        raise BaseException("out of something")

    monkeypatch.setattr(running.api.llm.engine, "step", broken)
    with running.http() as http, http.stream("POST", "/peagle/race", json=RACE) as response:
        lines = response.iter_lines()
        assert "lanes" in next(lines)
        until(lambda: posted.qsize() == 1)
        gate.set()
        assert "[DONE]" in "".join(lines)
    running.thread.join(30)
    assert not running.thread.is_alive() and running.api.worker.failed


def test_none_begins_while_the_server_ends(serve: Serve, brake: Brake) -> None:
    running = serve()
    brake.go.clear()
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(running.complete, "a", max_tokens=3)
        until(lambda: running.api.worker.open == 1)
        running.server.handle_exit(15, None)
        got = running.post("/peagle/race", json=RACE)
        brake.go.set()
        assert asked.result().choices, "what runs is finished"
    assert (got.status_code, got.json()["error"]["message"]) == (503, ENDING)


def test_a_race_that_fails(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its client is told; the server goes on."""
    running = serve()
    with monkeypatch.context() as patch:
        patch.setattr(console, "_run", Mock(side_effect=RuntimeError("a bug")))
        events = race(running)
    assert events[-1]["error"]["message"] == "it failed: see the server's log"
    assert race(running)[-1]["identical"]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"max_tokens": 257}, "max_tokens 257: "),
        ({"max_tokens": 0}, "max_tokens 0: "),
        ({"messages": []}, "messages []: "),
        ({"messages": [{"role": "user", "content": "a " * 300}]}, "shorten"),
    ],
)
def test_refused(running: Running, more: dict[str, Any], said: str) -> None:
    got = running.post("/peagle/race", json=RACE | more)
    assert got.status_code == 400 and said in got.text
