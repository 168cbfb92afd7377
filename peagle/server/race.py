"""A race: the same prompt decoded by the target alone and with each head there is, in turns.

Steps of a generator, for the thread that owns the target: it works for one method at a time. Each
method has an engine of its own, and the server's is not touched. As in `peagle demo` the mode is
deterministic: all methods emit the same tokens, or answers of different kinds would be compared.
"""

from collections.abc import Generator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from peagle.backends.batch import BLOCK
from peagle.catalog import known_entry
from peagle.engine.llm import LLM
from peagle.engine.params import SamplingParams
from peagle.engine.request import Request, pieces
from peagle.errors import InputError
from peagle.model.drafter import Drafter

ORDER = ("eagle3", "p-eagle")
MOST_TOKENS = 256  # of each answer: everybody else waits
MOST_PROMPT = 2048

Event = dict[str, Any]


class Lane(NamedTuple):
    """One way to decode; `head` is None, the one that is served, or a folder."""

    method: str
    k: int
    head: Drafter | Path | None


class Races:
    """The races of one server; heads that are not served are loaded when they first race."""

    def __init__(self, llm: LLM) -> None:
        self._llm, self._loaded = llm, dict[Path, Drafter]()

    def lanes(self) -> list[Lane]:
        """The target alone, then a head of each method: the served one, else the catalog's, where
        that is a folder of this machine (nothing is downloaded for a race)."""
        llm, lanes = self._llm, [Lane("none", 0, None)]
        entry = known_entry(llm.target.name)
        for method in ORDER:
            known = entry.heads.get(method) if entry else None
            if llm.method == method:
                lanes.append(
                    Lane(method, known.k if known and llm.adaptive else llm.k, llm.drafter)
                )
            elif known and known.folder and known.place:
                lanes.append(Lane(method, known.k, known.folder))
        return lanes

    def steps(self, ids: list[int], max_tokens: int) -> Generator[Event, None, None]:
        """Decode greedily, a round a step. Raises InputError for a prompt that is too long, and for
        a head that does not fit."""
        if len(ids) > MOST_PROMPT:
            raise InputError(f"messages: {len(ids)} tokens, a race takes {MOST_PROMPT}: shorten")
        lanes = self.lanes()
        yield {"lanes": [{"method": lane.method, "k": lane.k} for lane in lanes]}
        room = len(ids) + max_tokens + 4 * BLOCK
        own = LLM(self._llm.target, max_batch=1, kv_tokens=room, deterministic=True)
        params, answers = SamplingParams(max_tokens=max_tokens), list[list[int]]()
        for number, lane in enumerate(lanes):
            drafter, k = self._drafter(lane), lane.k or None
            warm_up = own.use(drafter, k)  # kernels for these numbers of rows
            warm_up.generate([ids], SamplingParams(max_tokens=4))
            # Another engine, which has nothing of the prompt in its cache.
            request = yield from _run(own.use(drafter, k), ids, params, number)
            answers.append(request.output)
        same = _alike(answers)
        yield {"same_tokens": same, "identical": all(len(each) == same for each in answers)}

    def _drafter(self, lane: Lane) -> Drafter | None:
        if not isinstance(lane.head, Path):
            return lane.head
        if lane.head not in self._loaded:
            self._loaded[lane.head] = self._llm.load_head(lane.head)
        return self._loaded[lane.head]


def _run(
    llm: LLM, ids: list[int], params: SamplingParams, lane: int
) -> Generator[Event, None, Request]:
    run = llm.stream([ids], params)
    [request] = run.requests
    first = 0.0
    with closing(run):
        while request.finish_reason is None:
            said = run.step()
            tokens = len(request.output)
            first = first or (run.seconds if tokens else 0.0)
            yield {"lane": lane, "at": run.seconds, "tokens": tokens, "pieces": pieces(said)}
    if request.failure is not None:
        raise InputError(request.failure)
    result = {
        "tokens": tokens,
        "seconds": run.seconds,
        "tokens_per_second": tokens / run.seconds,
        "first_token_seconds": first,
        "acceptance_length": request.stats.acceptance_length,
    }
    yield {"lane": lane, "result": result}
    return request


def _alike(answers: list[list[int]]) -> int:
    """How many tokens all answers begin with."""
    count = 0
    for tokens in zip(*answers, strict=False):
        if len(set(tokens)) > 1:
            break
        count += 1
    return count
