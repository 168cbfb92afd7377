"""Several LLMs, heads and threads over one target, in turns and at once: all get exactly what they
get alone, however the others end."""

import gc
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import own_answers, random_prompts

from peagle.backends.batch import Batch
from peagle.backends.tiles import ROW_TILE, TiledTarget
from peagle.backends.torch import TorchBackend
from peagle.engine.llm import LLM
from peagle.engine.params import SamplingParams
from peagle.engine.request import Chunk
from peagle.engine.run import Run
from peagle.model.attention import CausalAttend
from peagle.model.drafter import Drafter
from peagle.model.target import Target
from peagle.train.config import TrainConfig
from peagle.train.spec import HeadSpec
from peagle.train.trainer import Trainer
from peagle.train.warm_start import new_drafter

PROMPTS = random_prompts(4, 4, seed=9)
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)
K = 4

Outcome = list[tuple[list[int], int, tuple[int, ...]]]


@pytest.fixture(scope="module")
def heads(target: Target, tmp_path_factory: pytest.TempPathFactory) -> list[Drafter]:
    """Two heads that read different layers of the target, and are right now and then."""
    made = list[Drafter]()
    for layers in ((1, 2, 3), (0, 1, 2)):
        trainer = make_trainer(tmp_path_factory.mktemp("run"), target, layers, steps=60)
        trainer.run()
        made.append(trainer.drafter.eval())
    return made


def make_trainer(folder: Path, target: Target, layers: tuple[int, ...], steps: int) -> Trainer:
    data = own_answers(target, 48)
    spec = HeadSpec("p-eagle", layers=1, depths=K, draft_vocab=112, feature_layers=layers)
    head = new_drafter(target, [e.ids for e in data], spec)
    return Trainer(TrainConfig(folder, steps=steps, lr=3e-3), target, head, data)


def outcome(run: Run) -> Outcome:
    """Ids, and how drafts fared: what a disturbed engine would get wrong."""
    done = run.completions()
    return [(c.token_ids, c.stats.rounds, tuple(c.stats.accepted)) for c in done]


def play(llm: LLM) -> Outcome:
    run = llm.stream(PROMPTS, PARAMS)
    list(run)
    return outcome(run)


def tokens(found: Outcome) -> list[list[int]]:
    return [ids for ids, *_ in found]


def texts(run: Run, chunks: list[Chunk]) -> bool:
    """Whether the chunks of a stream are its whole answers."""
    received = [
        "".join(chunk.text for chunk in chunks if chunk.index == number)
        for number in range(len(run.requests))
    ]
    return received == [done.text for done in run.completions()]


def in_turns(*runs: Run) -> None:
    """A chunk of each stream in turn, to their ends. None of them loses text."""
    received = [list[Chunk]() for _ in runs]
    for chunks in zip_longest(*runs):
        for own, chunk in zip(received, chunks, strict=True):
            if chunk is not None:
                own.append(chunk)
    assert all(texts(run, own) for run, own in zip(runs, received, strict=True))


@pytest.mark.parametrize("switched", [None, 0, 1])
def test_another_head_in_the_middle_of_a_stream(
    target: Target, heads: list[Drafter], switched: int | None
) -> None:
    llm, wanted = LLM(target, heads[0], k=K), play(LLM(target, heads[0], k=K))
    run = llm.stream(PROMPTS, PARAMS)
    chunks = iter(run)
    next(chunks)
    other = llm.use(None if switched is None else heads[switched])
    assert (llm.drafter, llm.drafting.k) == (heads[0], K), "as it was"
    in_turns_with = other.stream(PROMPTS, PARAMS)
    for _ in in_turns_with:
        next(chunks, None)
    list(chunks)
    assert outcome(run) == wanted
    assert tokens(outcome(in_turns_with)) == tokens(wanted)
    assert tokens(play(llm)) == tokens(wanted)


def test_the_deterministic_mode_stays_tiled(
    target: Target, heads: list[Drafter], monkeypatch: pytest.MonkeyPatch
) -> None:
    exact, plain = LLM(target, backend=TorchBackend(exact=True)), LLM(target, heads[0], k=K)
    tiled = exact.engine.model
    assert isinstance(tiled, TiledTarget)
    sizes = {"tiled": set[int](), "plain": set[int]()}

    def note(model: Any, name: str) -> None:
        forward = model.forward

        def noted(batch: Batch, *others: Any) -> object:
            sizes[name].add(len(batch))
            return forward(batch, *others)

        monkeypatch.setattr(model, "forward", noted)

    note(tiled.model, "tiled")
    note(plain.engine.model, "plain")
    in_turns(exact.stream(PROMPTS, PARAMS), plain.stream(PROMPTS, PARAMS))
    assert sizes["tiled"] == {ROW_TILE} != sizes["plain"]


def test_other_work_with_the_target(target: Target, heads: list[Drafter], tmp_path: Path) -> None:
    """Forwards with other taps, copies, and training."""
    llm, wanted = LLM(target, heads[0], k=K), play(LLM(target, heads[0], k=K))
    ids = torch.tensor(PROMPTS[0])
    trainer = make_trainer(tmp_path, target, (0, 3), steps=2)
    alone = target.forward(ids, torch.arange(len(ids)), CausalAttend(), (3,))
    run = llm.stream(PROMPTS, PARAMS)
    for number, _ in enumerate(run):
        found = target.forward(ids, torch.arange(len(ids)), CausalAttend(), (3,))
        assert torch.equal(found.features, alone.features)
        if number == 3:
            trainer.run()
        if number == 5:
            target.exact().model.set_attn_implementation("eager")
    assert outcome(run) == wanted


@pytest.mark.parametrize("end", ["finished", "closed", "broken off", "dropped", "step", "deleted"])
def test_one_after_the_other(target: Target, heads: list[Drafter], end: str) -> None:
    """However a stream ends, another LLM may follow, and the first one may go on after it."""
    wanted = [play(LLM(target, head, k=K)) for head in heads]
    llms = [LLM(target, head, k=K) for head in heads]
    for turn in (0, 1, 0):
        leave(llms, turn, end)
        assert play(llms[1 - turn]) == wanted[1 - turn]
        if end != "deleted":
            assert llms[turn].engine.idle, "what it held is free"
            assert tokens(play(llms[turn])) == tokens(wanted[turn])


def leave(llms: list[LLM], turn: int, end: str) -> None:
    """Begin a stream and end it in one of the ways there are."""
    run = llms[turn].stream(PROMPTS, PARAMS)
    if end == "finished":
        list(run)
    elif end == "closed":
        chunks = iter(run)
        next(chunks)
        chunks.close()  # type: ignore[attr-defined]
    elif end == "broken off":
        for _ in run:
            break
    elif end == "dropped":
        next(iter(run))
    elif end == "step":
        run.step()
        run.close()
        run.close()
    else:
        run.step()
        llms[turn] = LLM(llms[turn].target, llms[turn].drafter, k=K)


@pytest.mark.parametrize("end", ["closed", "collected"])
def test_streams_that_end_beside_others(target: Target, heads: list[Drafter], end: str) -> None:
    """Streams of one LLM: those closed early take nothing from the one that continues."""
    llm, wanted = LLM(target, heads[0], k=K), play(LLM(target, heads[0], k=K))
    run, received = llm.stream(PROMPTS, PARAMS), list[Chunk]()
    left = list[Iterator[Chunk]]()
    for number, chunk in enumerate(run):
        received.append(chunk)
        if number % 5 == 0:
            left.append(iter(llm.stream(PROMPTS[:2], PARAMS)))
            next(left[-1])
        if number % 7 == 6:
            early = left.pop()
            if end == "closed":
                early.close()  # type: ignore[attr-defined]
            del early
            gc.collect()
    left.clear()
    gc.collect()
    assert texts(run, received) and tokens(outcome(run)) == tokens(wanted)
    assert llm.engine.idle
    assert tokens(play(llm)) == tokens(wanted)


@pytest.mark.parametrize("verb", ["forward", "logits"])
def test_a_stream_that_is_collected_in_the_middle_of_a_round(
    target: Target, heads: list[Drafter], monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    """Cycles are collected wherever memory is asked for."""
    llm, wanted = LLM(target, heads[0], k=K, max_batch=32), play(LLM(target, heads[0], k=K))
    model = llm.engine.model
    compute = getattr(model, verb)

    def collected(*given: Any, **named: Any) -> object:
        gc.collect()
        return compute(*given, **named)

    def leave_cycle() -> None:
        prompts = [list(range(5, end)) for end in range(30, 46)]  # some fill a block in the round
        chunks = iter(llm.stream(prompts, PARAMS))
        next(chunks)
        cycle: list[object] = [chunks]
        cycle.append(cycle)

    run = llm.stream(PROMPTS, PARAMS)
    chunks = iter(run)
    next(chunks)
    gc.disable()
    try:
        for _ in range(3):
            leave_cycle()
            with monkeypatch.context() as patch:
                patch.setattr(model, verb, collected)
                run.step()
    finally:
        gc.enable()
    list(chunks)
    assert tokens(outcome(run)) == tokens(wanted)
    assert llm.engine.idle
    pool = llm.engine.scheduler.pool
    assert pool.free == pool.count, "its blocks are free"
    assert tokens(play(llm)) == tokens(wanted)
