"""A race: the same prompt decoded by the target alone and with each head there is, in turns.

An exclusive job for the engine thread. Each method has an engine of its own, which drafts with the
options that the server was started with; the server's engine is not touched. As in `peagle demo`
the mode is deterministic: all methods emit the same tokens, or answers of different kinds would be
compared.
"""

from collections.abc import Generator
from contextlib import closing
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from peagle.backends.batch import BLOCK
from peagle.catalog import known_entry
from peagle.engine.drafting import MAX_NODES
from peagle.engine.llm import LLM
from peagle.engine.params import SamplingParams
from peagle.engine.request import Request
from peagle.errors import InputError
from peagle.methods.registry import method_of
from peagle.model.drafter import Drafter
from peagle.server.jobs import pieces

MOST_TOKENS = 256  # of each answer: all other requests wait
MOST_PROMPT = 2048

Event = dict[str, Any]


class Lane(NamedTuple):
    """One way to decode; `head` is the served one, a folder, or None without a head."""

    method: str
    head: Drafter | Path | None


class Races:
    """The races of one server; heads that are not served are loaded when they first race."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._load = cache(llm.load_head)

    def lanes(self) -> list[Lane]:
        """The target alone, then the heads in the catalog's order: those in folders of this
        machine (nothing is downloaded for a race), and what is served."""
        llm, lanes = self._llm, {"none": Lane("none", None)}
        entry = known_entry(llm.target.name)
        for method, head in (entry.heads if entry else {}).items():
            if head.folder and head.folder.is_dir():
                lanes[method] = Lane(method, head.folder)
        lanes[llm.drafting.method] = Lane(llm.drafting.method, llm.drafter)
        return list(lanes.values())

    def steps(self, ids: list[int], max_tokens: int) -> Generator[Event, None, None]:
        """Decode greedily, a round a step. Raises InputError for a prompt that is too long, and for
        a head that does not fit."""
        if len(ids) > MOST_PROMPT:
            raise InputError(f"messages: {len(ids)} tokens, a race takes {MOST_PROMPT}: shorten")
        room = len(ids) + max_tokens + MAX_NODES + 2 * BLOCK
        own = LLM(self._llm.target, max_batch=1, kv_tokens=room, deterministic=True)
        lanes = self.lanes()
        runners = [self._use(own, lane) for lane in lanes]
        ways = [llm.drafting for llm in runners]
        yield {"lanes": [{"method": way.method, "drafts": str(way).strip("-")} for way in ways]}
        params = SamplingParams(max_tokens=max_tokens)
        answers = list[list[int]]()
        for number, (lane, llm) in enumerate(zip(lanes, runners, strict=True)):
            warm_up = self._use(own, lane)  # kernels for these numbers of rows
            warm_up.generate([ids], SamplingParams(max_tokens=4))
            # Another engine, which has nothing of the prompt in its cache.
            request = yield from _run(llm, ids, params, number)
            answers.append(request.output)
        same = _common_length(answers)
        yield {"same_tokens": same, "identical": all(len(each) == same for each in answers)}

    def _use(self, own: LLM, lane: Lane) -> LLM:
        """Another LLM over the target of `own`, with a lane's head and the server's options."""
        if lane.method == "none":
            return own.use(None, lookup=False)
        head = self._load(lane.head) if isinstance(lane.head, Path) else lane.head
        served = self._llm.drafting
        chains = head is not None and not method_of(head.config).parallel
        if served.mode == "none":
            return own.use(head)
        if served.mode == "tree" and chains and not served.lookup:
            return own.use(head, lookup=False)
        return own.use(head, **served.options)


def _run(
    llm: LLM, ids: list[int], params: SamplingParams, lane: int
) -> Generator[Event, None, Request]:
    run = llm.stream([ids], params)
    [request] = run.requests
    first = 0.0
    found = 0
    with closing(run):
        while request.finish_reason is None:
            chunks = run.step()
            tokens = len(request.output)
            found += sum(chunk.source == "lookup" for chunk in chunks)
            first = first or (run.seconds if tokens else 0.0)
            yield {"lane": lane, "at": run.seconds, "tokens": tokens, "pieces": pieces(chunks)}
    if request.failure is not None:
        raise InputError(request.failure)
    result = {
        "tokens": tokens,
        "seconds": run.seconds,
        "tokens_per_second": tokens / run.seconds,
        "first_token_seconds": first,
        "acceptance_length": request.stats.acceptance_length,
        "nodes": request.stats.nodes_per_round,
        "tokens_per_forward": request.stats.tokens_per_forward,
        "from_lookup": found / tokens,
    }
    yield {"lane": lane, "result": result}
    return request


def _common_length(answers: list[list[int]]) -> int:
    """The number of tokens that all answers begin with."""
    columns = zip(*answers, strict=False)
    return sum(1 for _ in takewhile(lambda tokens: len(set(tokens)) == 1, columns))
