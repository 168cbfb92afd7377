"""Conversations played with an engine, measurements by it, and the verdict of `peagle eval`."""

import os
import platform
import re
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch

from peagle.bench.summary import Cell, Played, Result, Sample, acceptance_row, doubt, joined, row
from peagle.data.chat import Message, prompt_ids
from peagle.engine.drafting import Drafting
from peagle.engine.llm import LLM
from peagle.engine.params import RequestFailure, SamplingParams
from peagle.engine.request import Request, Stats
from peagle.errors import InputError
from peagle.model.drafter import Drafter

WARM_UP = [["Say hello."]]
# torch reads 32 bits of a seed.
MAX_TURNS = 1 << 6  # seeds of a conversation: one for each turn
SEEDS = 1 << 20  # of a part, the same in each cell
PROMPTS = 4  # timed for a verdict; a benchmark takes more
MAX_TOKENS = 64  # of their answers
SPARE = 512  # tokens of KV cache for a draft, and for a warm-up that is longer than the prompts
MIN_GAIN = 1.05  # a smaller speed-up is noise
TRAINED = 1.3  # acceptance length of a head that has learned its target

Conversations = list[list[str]]  # the user turns of each
OnTurns = Callable[[int], None]  # called with the number of turns that are done or left out
Timing = dict[str, Any]  # a row of `summary.row`, with the acceptance length on all prompts


class Player:
    """Plays loads with an engine, whose rounds it runs itself."""

    def __init__(self, llm: LLM, params: SamplingParams) -> None:
        self.llm = llm
        self.params = params
        self._engine = llm.engine
        self._now = 0.0  # time of the last round's end

    def play(
        self,
        conversations: Conversations,
        concurrency: int,
        on_turns: OnTurns = lambda turns: None,
        first: int = 0,
    ) -> Played:
        """Play `concurrency` conversations at a time, numbered from `first`; the next begins when
        one has ended."""
        self.samples = list[Sample]()
        self.stats = Stats()
        started = time.perf_counter()
        numbered = enumerate(conversations, first)
        waiting = (self._conversation(number, turns, on_turns) for number, turns in numbered)
        running = list[Iterator[None]]()
        while True:
            running = [each for each in running if _goes_on(each)]
            while len(running) < concurrency and (new := next(waiting, None)):
                if _goes_on(new):
                    running.append(new)
            if not running:
                return Played(self.samples, time.perf_counter() - started, self.stats)
            self._engine.step()
            self._now = time.perf_counter()

    def request(self, messages: list[Message], params: SamplingParams) -> Request:
        """The request for an answer; benchmarks with random weights override it. Raises InputError
        for a conversation that cannot be answered."""
        ids = self.llm.prompt_ids(prompt_ids(self.llm.tokenizer, messages))
        return self.llm.make_requests(ids, params)[0]

    def _conversation(self, number: int, turns: list[str], on_turns: OnTurns) -> Iterator[None]:
        """Ask the turns in order; a failure ends it. Yields while it waits for a round."""
        history = list[Message]()
        for turn, text in enumerate(turns):
            history.append({"role": "user", "content": text})
            sample = yield from self._turn(number, turn, history)
            self.samples.append(sample)
            if sample.error is not None:
                on_turns(len(turns) - turn)
                return
            history.append({"role": "assistant", "content": sample.text})
            on_turns(1)

    def _turn(
        self, number: int, turn: int, history: list[Message]
    ) -> Generator[None, None, Sample]:
        """Answer a conversation, once it has been asked for as many rounds as that takes. Its seed
        does not depend on when it is asked."""
        asked = time.perf_counter()
        seed = (self.params.seed or 0) + number * MAX_TURNS + turn
        try:
            request = self.request(history, replace(self.params, seed=seed))
        except InputError as error:
            return Sample(number, turn, time.perf_counter() - asked, error=str(error))
        self._engine.add(request)
        first = None
        while request.finish_reason is None:
            yield
            request.emitted = []
            if first is None and len(request.tokens) > request.prompt_length:
                first = self._now
        self.stats += request.stats
        seconds = self._now - asked
        if request.failure is not None or first is None:
            return Sample(number, turn, seconds, error=request.failure or "no token was generated")
        output = tuple(request.output)
        return Sample(number, turn, seconds, first - asked, len(output), output, request.text.text)


def _goes_on(conversation: Iterator[None]) -> bool:
    """Advance a conversation to its next round; False: it has ended."""
    return next(conversation, True) is None


def play(
    results: list[Result],
    parts: Sequence[tuple[int, Conversations]],
    opened: Callable[[Cell, int], Player],  # of a cell, with a seed
    on_load: Callable[[], None] = lambda: None,
) -> None:
    """Play every part in each cell in turn, and add it to the cell's result. A part is the number
    of its first conversation, and all of them. The order of the cells rotates from one part to the
    next, so that noise of the machine affects all alike. Parts are repeats of all conversations, or
    single ones, which are compared more fairly. An answer has the same seed in all cells.

    Calls `on_load` after each. Each engine is warmed up at the load of its cell: it observes costs,
    and records graphs on a GPU. Raises RequestFailure where that is not answered.
    """
    step = max(1, len(results) // len(parts))
    warm = WeakSet[LLM]()
    for number, (first, conversations) in enumerate(parts):
        turn = number * step % len(results)
        for result in results[turn:] + results[:turn]:
            load = result.cell.concurrency
            player = None  # the next engine has the memory of the last one
            player = opened(result.cell, number * SEEDS)
            if player.llm not in warm:
                warm.add(player.llm)
                if errors := player.play(WARM_UP * load, load).errors:
                    raise RequestFailure(f"{result.cell}: {errors[0]}")
            result.repeats.append(player.play(conversations, load, first=first))
            on_load()


def measure_acceptance(
    llm: LLM,
    conversations: Conversations,
    params: SamplingParams,
    on_turns: OnTurns = lambda turns: None,
) -> dict[str, Any]:
    """Answer every turn of every conversation (later turns see the target's earlier answers).

    Returns the cell, what was accepted, rounds, output tokens, how many turns were left out because
    they or one before them failed, as by a prompt that fills the target's context, and the first
    error. Raises InputError for a target without a chat template, RequestFailure where all fail.
    """
    prompt_ids(llm.tokenizer, [{"role": "user", "content": conversations[0][0]}])
    cell = Cell(llm.drafting, min(llm.max_batch, len(conversations)), params.temperature)
    played = Player(llm, params).play(conversations, cell.concurrency, on_turns)
    answered = [sample for sample in played.samples if sample.error is None]
    if not answered:
        raise RequestFailure(played.errors[0])
    return {
        **cell.row,
        **acceptance_row(played.drafting),
        "rounds": played.drafting.rounds,
        "output_tokens": sum(sample.tokens for sample in answered),
        "skipped_turns": sum(map(len, conversations)) - len(answered),
        "error": next(iter(played.errors), None),
    }


def side_by_side(
    llm: LLM,
    drafters: Mapping[Drafting, Drafter | None],
    prompts: list[str],
    params: SamplingParams,
    on_load: Callable[[], None] = lambda: None,
) -> list[Result]:
    """Answer prompts, one at a time, with the target alone and with each drafting in turn; a result
    is one play of all prompts. All engines are there at once, so none takes more memory than an
    answer needs."""
    ways = {Drafting(): None, **drafters}
    asked = [[{"role": "user", "content": prompt}] for prompt in prompts]
    room = max(len(prompt_ids(llm.tokenizer, each)) for each in asked) + params.max_tokens
    room = min(room, llm.target.max_context) + SPARE
    sizes: dict[str, Any] = {"max_batch": 1, "kv_tokens": room}
    used = {way: llm.use(drafter, **way.options, **sizes) for way, drafter in ways.items()}
    results = [Result(Cell(way, 1, params.temperature)) for way in ways]
    parts = [(number, [[prompt]]) for number, prompt in enumerate(prompts)]
    play(results, parts, lambda cell, _: Player(used[cell.drafting], params), on_load)
    return [replace(result, repeats=[joined(result.repeats)]) for result in results]


def time_head(
    llm: LLM, measured: list[dict[str, Any]], conversations: Conversations, params: SamplingParams
) -> list[Timing]:
    """Time the head in `llm` in every setting of `measured` (rows of `measure_acceptance`), on the
    first turns of the first conversations. It leaves out a setting in which none of them is
    answered with the head and without."""
    prompts = [turns[0] for turns in conversations[:PROMPTS]]
    lengths = {Drafting.from_row(row): row["acceptance_length"] for row in measured}
    few = replace(params, max_tokens=min(MAX_TOKENS, params.max_tokens))
    alone, *heads = side_by_side(llm, dict.fromkeys(lengths, llm.drafter), prompts, few)
    timings = [one for one in (row(head, alone) for head in heads) if "speed_up" in one]
    return [one | {"acceptance_length": lengths[Drafting.from_row(one)]} for one in timings]


def _certain(timing: Timing) -> bool:
    """True when the interval excludes equal speed."""
    edges = timing["speed_up_95"]
    return edges is not None and not edges[0] <= 1 <= edges[1]


def _worth_it(timing: Timing) -> bool:
    """A speed-up a little beyond the acceptance length is noise, far beyond it is in doubt."""
    gain = min(timing["speed_up"], timing["acceptance_length"])
    return doubt(timing) is None and _certain(timing) and gain >= MIN_GAIN


def verdict(timings: list[Timing]) -> dict[str, Any]:
    """The best setting, whether it is worth it, and that in one sentence."""
    best = max(timings, key=lambda timing: (doubt(timing) is not None, timing["speed_up"]))
    setting = {name: best[name] for name in ("k", "max_nodes", "speed_up", "speed_up_95")}
    judged = {"worth_it": _worth_it(best), "sentence": sentence(best)}
    return judged | setting | {"timings": timings}


def sentence(best: Timing) -> str:
    """A sentence: is the head worth it on these prompts and this machine, and if not, the fix."""
    if why := doubt(best):
        return f"not judged: {why}"
    edges = "" if best["speed_up_95"] is None else " ({:.2f}–{:.2f})".format(*best["speed_up_95"])
    speed = f"{best['speed_up']:.2f} ×{edges} the target alone at {Drafting.from_row(best)}"
    length = f"acceptance length {best['acceptance_length']:.2f}"
    if not _certain(best):
        few = "too few prompts to tell whether it is worth it"
        return f"{few}: {speed} ({length}); peagle bench measures more"
    if _worth_it(best):
        return f"worth it: {speed} ({length})"
    advice = "drafting costs more here than it saves: try another K or a smaller head"
    if best["acceptance_length"] < TRAINED:
        advice = "train it on answers of this target (peagle train --init-from)"
    return f"not worth it: {speed}; {length}: {advice}"


def device_name(device: torch.device) -> str:
    """The GPU, or the machine where the device is its CPU, in words."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.is_file() else ""
    known = dict(re.findall(r"^(cpu family|model|model name)\s*: (.+)$", text, re.MULTILINE))
    model = known.get("model name") or platform.processor() or platform.machine()
    if "cpu family" in known:  # virtual machines often hide the rest of the name
        model += f" (family {known['cpu family']}, model {known['model']})"
    return f"{model}, {torch.get_num_threads()} of {os.cpu_count()} cores"
