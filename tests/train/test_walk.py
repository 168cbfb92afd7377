"""The walk finds the rounds that the engine runs, with documents that training never sees."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from tiny import METHODS, make_drafter, make_target, random_prompts

from peagle.data.example import Example
from peagle.engine.llm import LLM
from peagle.engine.params import SamplingParams
from peagle.engine.run import Completion
from peagle.model.drafter import Drafter
from peagle.model.target import Target
from peagle.train.config import TrainConfig
from peagle.train.processes import rebuilt
from peagle.train.spec import HeadSpec
from peagle.train.trainer import Trainer
from peagle.train.walk import HELD_OUT, Round, Walk, acceptance, hold_out, stats
from peagle.train.warm_start import new_drafter, with_correction

LENGTH, BEYOND = 40, 12  # tokens of an answer, and of what the target would say after it


@pytest.fixture(scope="module")
def target() -> Target:
    return make_target(spread=0.3)


@pytest.fixture(scope="module")
def documents(target: Target) -> list[Example]:
    """Greedy answers; what comes after them is known, so that a draft may pass their end."""
    prompts = random_prompts(6, 4, seed=9)
    params = SamplingParams(max_tokens=LENGTH + BEYOND, ignore_eos=True)
    answers = LLM(target, max_batch=1, lookup=False).generate(prompts, params)
    flags = [True] * LENGTH + [False] * BEYOND
    return [
        Example([*prompt, *answer.token_ids], [False] * len(prompt) + flags)
        for prompt, answer in zip(prompts, answers, strict=True)
    ]


@pytest.fixture(scope="module")
def trained(target: Target, documents: list[Example], tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    """Heads that know these answers fairly well, by method; P-EAGLE's has a correction."""

    def train(method: str) -> Drafter:
        torch.manual_seed(0)
        spec = HeadSpec(method, layers=1, depths=7, draft_vocab=100, feature_layers=(1, 2, 3))
        drafter = new_drafter(target, [example.ids for example in documents], spec)
        if method == "p-eagle":
            drafter = with_correction(drafter, frozen=False)
        config = TrainConfig(tmp_path_factory.mktemp(method), steps=100, lr=5e-3)
        Trainer(config, target, drafter, documents).run()
        return drafter.eval()

    return {method: train(method) for method in METHODS}


def decoded(llm: LLM, documents: list[Example]) -> list[Completion]:
    prompts = [example.ids[: example.supervised.index(True)] for example in documents]
    return llm.generate(prompts, SamplingParams(max_tokens=LENGTH, ignore_eos=True))


def counts(rounds: list[list[Round]]) -> list[tuple[int, int]]:
    return [(len(each), sum(one.accepted for one in each)) for each in rounds]


def same(rounds: list[list[Round]], answers: list[Completion]) -> bool:
    """Document by document, as many rounds, and as many accepted tokens in the answer."""
    return counts(rounds) == [(each.stats.rounds, sum(each.drafted)) for each in answers]


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("method", METHODS)
def test_chains_equal_the_engine(
    target: Target,
    documents: list[Example],
    trained: dict[str, Drafter],
    method: str,
    window: int | None,
) -> None:
    """With a window that answers outgrow, too: training sees what slots see."""
    head = trained[method]
    sizes = replace(head.config.transformer, sliding_window=window)
    config = replace(head.config, transformer=sizes)
    drafter = rebuilt(head, config, head.state_dict()).eval()
    walk, accepted = Walk(target, documents), list[float]()
    for k in (1, 2, 3, 7):
        rounds = walk.rounds(drafter, k)
        llm = LLM(target, drafter, k=k, max_batch=1)
        assert same(rounds, decoded(llm, documents)), k
        accepted.append(stats(rounds, k).acceptance_length)
    assert 1.3 < accepted[0] < accepted[1] < accepted[3], "tokens are accepted at several depths"


def test_correction(target: Target, documents: list[Example], trained: dict[str, Drafter]) -> None:
    walk, other = Walk(target, documents), deepcopy(trained["p-eagle"])
    assert other.correction is not None
    torch.nn.init.zeros_(other.correction.token.weight)
    assert walk.rounds(other, 7) != walk.rounds(trained["p-eagle"], 7)


def test_each_answer_of_a_conversation_is_walked_alone(target: Target) -> None:
    """The target writes an answer's first token itself; drafts end with the answer."""
    flags = [False, False, True, True, True, False, True, True, False]
    walk = Walk(target, [Example(list(range(5, 14)), flags)])
    [rounds] = walk.rounds(make_drafter(target, "p-eagle"), 3)
    assert {one.newest for one in rounds} <= {2, 3, 6}
    assert sum(one.accepted + 1 for one in rounds) == 2 + 1


def test_states_made_before_are_used(target: Target, documents: list[Example]) -> None:
    """Asked for at each measurement: where they were captured nothing is kept in memory."""
    plain, head = Walk(target, documents), make_drafter(target, "p-eagle")
    expected = plain.rounds(head, 7)
    kept = {number: features for (number, _), features in plain._features.items()}

    def states(numbers: list[int], _: Target):  # type: ignore[no-untyped-def]
        return type("Output", (), {"features": kept[numbers[0]]})

    walk = Walk(target, documents, states)
    assert walk.rounds(head, 7) == expected == walk.rounds(head, 7)
    assert not walk._features


class OnDevice:
    """Features that lie on another device."""

    def cpu(self) -> torch.Tensor:
        return torch.ones(3)


def test_features_wait_on_the_cpu(
    target: Target, documents: list[Example], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = list[OnDevice]()

    def run_document(*_: object):  # type: ignore[no-untyped-def]
        made.append(OnDevice())
        return type("Output", (), {"features": made[-1]})

    monkeypatch.setattr("peagle.train.walk.run_document", run_document)
    walk = Walk(target, documents)
    for _ in range(2):
        assert torch.equal(walk._target_features(0, (1, 2, 3)), torch.ones(3))
    assert len(made) == 1, "the target runs over a document once"


def test_acceptance_is_of_chains_as_long_as_the_head_was_trained_for(
    target: Target, documents: list[Example], trained: dict[str, Drafter]
) -> None:
    walk = Walk(target, documents)
    found = acceptance(walk, trained["p-eagle"])
    rounds = walk.rounds(trained["p-eagle"], 7)
    assert found.rounds == sum(map(len, rounds))
    assert found.acceptance_length == pytest.approx(
        1 + sum(a for _, a in counts(rounds)) / found.rounds
    )
    assert len(found.accepted) == 7


def test_answers_too_short_for_a_round(target: Target) -> None:
    """Their only token is the target's own."""
    walk = Walk(target, [Example([5, 6, 7], [False, False, True])] * 2)
    found = acceptance(walk, make_drafter(target, "p-eagle"))
    assert (found.acceptance_length, found.accepted_per_position) == (1.0, [])
    assert (found.rounds, len(found.accepted)) == (0, 7)


def test_held_out_documents_are_spread_and_not_trained_on() -> None:
    data = [Example([i, 1, 2], [False, True, True]) for i in [*range(40), 5]]
    train, measured = hold_out(data)
    assert measured == [0, 10, 20, 30] and set(train) | set(measured) == set(range(41))
    data[10] = data[11]
    assert hold_out(data)[1] == [0, 20, 30], "one that is trained on is not measured"
    assert hold_out(data[:9]) == (list(range(9)), []), "too few to spare any"
    many = hold_out([Example([i, 1, 2], [False, True, True]) for i in range(5000)])
    assert len(many[1]) == HELD_OUT
