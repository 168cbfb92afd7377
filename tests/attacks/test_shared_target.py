"""Several LLMs, heads and threads over one target: a refused one is told why, and all others get
exactly what they get alone."""

import gc
import json
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny import make_target, own_answers, random_prompts

from peagle.engine.llm import LLM, Run
from peagle.engine.request import SamplingParams
from peagle.model.attend import ROW_TILE
from peagle.model.drafter import Drafter
from peagle.model.lease import TargetInUse
from peagle.model.shape import HeadSpec
from peagle.model.target import Target
from peagle.train.start import new_drafter
from peagle.train.trainer import TrainConfig, Trainer

PROMPTS = random_prompts(4, 4, seed=9)
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)
K = 4
OTHER_LLM = r"target tiny-0: another LLM decodes over it: finish or close its stream first"
THREADS = Path(__file__).with_name("threads.py")

Outcome = list[tuple[list[int], int, tuple[int, ...]]]


@pytest.fixture(scope="module")
def target() -> Target:
    return make_target()


@pytest.fixture(scope="module")
def heads(target: Target, tmp_path_factory: pytest.TempPathFactory) -> list[Drafter]:
    """Two heads that read different layers of the target, and are right now and then."""
    data, made = own_answers(target, 48), []
    for layers in ((1, 2, 3), (0, 1, 2)):
        spec = HeadSpec("p-eagle", layers=1, depths=K, draft_vocab=112, feature_layers=layers)
        head = new_drafter(target, [e.ids for e in data], spec)
        folder: Path = tmp_path_factory.mktemp("run")
        Trainer(TrainConfig(folder, steps=60, lr=3e-3), target, head, data).run()
        made.append(head.eval())
    return made


@pytest.fixture(params=["no head", "another head", "deterministic", "adaptive"])
def other(request: pytest.FixtureRequest, target: Target, heads: list[Drafter]) -> LLM:
    """Who disturbs."""
    kinds = {
        "no head": lambda: LLM(target),
        "another head": lambda: LLM(target, heads[1], k=K),
        "deterministic": lambda: LLM(target, heads[0], k=K, deterministic=True),
        "adaptive": lambda: LLM(target, heads[1]),  # which times the target when it begins
    }
    return kinds[request.param]()


def outcome(run: Run) -> Outcome:
    """Ids, and how drafts fared: what a disturbed engine would get wrong."""
    done = run.completions()
    return [(c.token_ids, c.stats.rounds, tuple(c.stats.accepted)) for c in done]


def play(llm: LLM) -> Outcome:
    run = llm.stream(PROMPTS, PARAMS)
    list(run)
    return outcome(run)


def disturb(run: Run, other: LLM) -> None:
    """Run a stream to its end; another LLM, which asks after every chunk, is always refused."""
    for _ in run:
        if any(request.finish_reason is None for request in run.requests):
            with pytest.raises(TargetInUse, match=OTHER_LLM):
                other.generate(PROMPTS, PARAMS)


def tokens(found: Outcome) -> list[list[int]]:
    return [ids for ids, *_ in found]


def test_streams_of_two_llms_in_turns(target: Target, heads: list[Drafter], other: LLM) -> None:
    llm, wanted = LLM(target, heads[0], k=K), play(LLM(target, heads[0], k=K))
    assert sum(sum(accepted) for *_, accepted in wanted) > 5, "drafts are accepted"
    run = llm.stream(PROMPTS, PARAMS)
    disturb(run, other)
    assert outcome(run) == wanted
    assert tokens(play(other)) == tokens(wanted)


def test_a_stream_made_before_and_begun_amid_another(target: Target, heads: list[Drafter]) -> None:
    """Making a stream disturbs nobody; a refused one can begin later."""
    wanted = play(LLM(target, heads[0], k=K)), play(LLM(target, heads[1], k=K))
    first, second = (LLM(target, head, k=K).stream(PROMPTS, PARAMS) for head in heads)
    chunks = iter(first)
    next(chunks)
    with pytest.raises(TargetInUse, match=OTHER_LLM):
        second.step()
    list(chunks)
    list(second)
    assert (outcome(first), outcome(second)) == wanted


@pytest.mark.parametrize("switched", [None, 0, 1])
def test_another_head_in_the_middle_of_a_stream(
    target: Target, heads: list[Drafter], switched: int | None
) -> None:
    llm, wanted = LLM(target, heads[0], k=K), play(LLM(target, heads[0], k=K))
    run = llm.stream(PROMPTS, PARAMS)
    chunks = iter(run)
    next(chunks)
    head = None if switched is None else heads[switched]
    with pytest.raises(TargetInUse, match="a stream of this LLM runs: finish or close it"):
        llm.use(head)
    assert (llm.drafter, llm.k, llm.adaptive) == (heads[0], K, False), "as it was"
    list(chunks)
    assert outcome(run) == wanted
    llm.use(head)
    assert tokens(play(llm)) == tokens(wanted)


def test_a_larger_batch_in_the_middle_of_a_stream(target: Target, heads: list[Drafter]) -> None:
    """Another engine of the same LLM is another engine."""
    llm, wanted = LLM(target, heads[0], k=K), play(LLM(target, heads[0], k=K))
    run = llm.stream(PROMPTS, PARAMS)
    chunks = iter(run)
    next(chunks)
    llm.max_batch = 2
    with pytest.raises(TargetInUse, match=OTHER_LLM):
        llm.generate(PROMPTS, PARAMS)
    list(chunks)
    assert outcome(run) == wanted
    assert tokens(play(llm)) == tokens(wanted)


def test_the_deterministic_mode_stays_tiled(target: Target, heads: list[Drafter]) -> None:
    exact, plain = LLM(target, deterministic=True), LLM(target, heads[0], k=K)
    run, sizes, forward = exact.stream(PROMPTS, PARAMS), set[int](), target.forward

    def noted(*rows: torch.Tensor) -> object:
        sizes.add(target.row_tile)
        return forward(*rows)

    target.forward = noted  # type: ignore[method-assign]
    try:
        disturb(run, plain)
        assert sizes == {ROW_TILE}
        sizes.clear()
        list(plain.stream(PROMPTS, PARAMS))
        assert sizes == {1}
    finally:
        del target.forward


def test_taps_that_others_set_are_put_back(target: Target, heads: list[Drafter]) -> None:
    """Training and `peagle doctor` tap the target for themselves."""
    llm, wanted = LLM(target, heads[0], k=K), play(LLM(target, heads[0], k=K))
    run = llm.stream(PROMPTS, PARAMS)
    for _ in run:
        target.tap((3,))
        target.exact(True)
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
            assert play(llms[turn]) == wanted[turn]


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
        llms[turn] = LLM(run.engine.target, run.engine.drafter, k=K)


def test_a_stream_that_never_began_holds_nothing(target: Target, heads: list[Drafter]) -> None:
    waiting = [LLM(target, head, k=K).stream(PROMPTS, PARAMS) for head in heads]
    wanted = play(LLM(target))
    for run in waiting:
        list(run)
        assert tokens(outcome(run)) == tokens(wanted)


def test_streams_of_one_llm_in_turns_still_work(target: Target, heads: list[Drafter]) -> None:
    """Its engine batches them."""
    llm, wanted = LLM(target, heads[0], k=K), play(LLM(target, heads[0], k=K))
    runs = [llm.stream(PROMPTS, PARAMS) for _ in range(3)]
    while any(request.finish_reason is None for run in runs for request in run.requests):
        for run in runs:
            run.step()
    assert [tokens(outcome(run)) for run in runs] == [tokens(wanted)] * 3


def test_a_deleted_llm_is_forgotten_at_once(target: Target, heads: list[Drafter]) -> None:
    """Without waiting for the collector of cycles: nobody keeps an engine but its LLM and runs."""
    gc.disable()
    try:
        llm = LLM(target, heads[0])
        run = llm.stream(PROMPTS, PARAMS)
        run.step()
        engine = weakref.ref(run.engine)
        del llm, run
        assert engine() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("attack", ["one LLM", "two LLMs", "one LLM, bfloat16", "handed over"])
def test_threads(attack: str, count: Callable[..., None]) -> None:
    """In a process of its own, which must survive."""
    done = subprocess.run(
        [sys.executable, str(THREADS), attack],
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["wrong"] == [] and found["right"] > 0, found
    assert found["after"] == "right", "one thread alone works as ever"
    if attack != "handed over":
        assert found["refused"] > 0, found
    count("answers of threads that share a target, all right", found["right"])
    count("threads refused, which would have shared a target", found["refused"])
