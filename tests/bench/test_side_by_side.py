"""The three-way comparison: same prompts, interleaved, order rotating, one row each."""

from typing import Any

import pytest
from tiny import METHODS, make_drafter, make_target, random_prompts

from peagle.bench.side_by_side import Contender, compare, device_name, identical, load_contenders
from peagle.engine.drafting import Drafting
from peagle.engine.llm import LLM
from peagle.engine.params import SamplingParams
from peagle.engine.request import Stats
from peagle.methods.save import save_drafter

PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)
PROMPTS = random_prompts(4)


@pytest.fixture
def llm() -> LLM:
    return LLM(make_target(), max_batch=1)


def chain(method: str, k: int) -> Drafting:
    return Drafting(method, "chain", k)


@pytest.fixture
def contenders(llm: LLM) -> list[Contender]:
    rows = [Contender(chain(m, 2), make_drafter(llm.target, m)) for m in METHODS]
    return [Contender(Drafting()), *rows]


def test_rows_count_all_prompts_and_agree(llm: LLM, contenders: list[Contender]) -> None:
    seen: list[int] = []
    compare(llm, contenders, PROMPTS, PARAMS, lambda: seen.append(1))
    assert len(seen) == 4
    plain = [answer.token_ids for answer in LLM(llm.target, lookup=False).generate(PROMPTS, PARAMS)]
    for contender in contenders:
        assert contender.outputs == plain, contender.drafting
        row = contender.row()
        assert row["output_tokens"] == 48  # the warm-up is not counted
        assert row["tokens_per_second"] == pytest.approx(48 / contender.seconds, rel=1e-2)
    assert identical(contenders)
    assert [(c.row()["method"], c.row()["k"]) for c in contenders] == [
        ("none", 0),
        ("p-eagle", 2),
        ("eagle3", 2),
    ]


def test_order_rotates(
    llm: LLM, contenders: list[Contender], monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    real = LLM.stream

    def stream(used: LLM, *args: Any) -> object:
        order.append(used.drafting.method)
        return real(used, *args)

    monkeypatch.setattr(LLM, "stream", stream)
    compare(llm, contenders, PROMPTS, PARAMS)
    names = ["none", "p-eagle", "eagle3"]
    assert order == [names[(turn + i) % 3] for turn in range(4) for i in range(3)]


def test_identical_notices_one_token() -> None:
    same = [Contender(one, outputs=[[1, 2], [3]]) for one in (Drafting(), chain("eagle3", 2))]
    assert identical(same)
    same[1].outputs[1] = [4]
    assert not identical(same)


def test_row_has_the_fields_of_demo_json() -> None:
    contender = Contender(chain("p-eagle", 3), seconds=2.0, outputs=[[5] * 7, [6]])
    contender.stats = Stats(4, 12, [3, 1, 0], accepted_from_lookup=1, forwards=6, tokens=9)
    assert contender.row() == {
        "method": "p-eagle",
        "k": 3,
        "max_nodes": None,
        "lookup": False,
        "tokens_per_second": 4.0,
        "acceptance_length": 2.0,
        "accepted_per_position": [0.75, 0.25, 0.0],
        "nodes": 3.0,
        "rows_per_round": 3.0,
        "tokens_per_forward": 1.5,
        "accepted_from_lookup": 1,
        "output_tokens": 8,
        "seconds": 2.0,
    }


def test_contenders_are_loaded_with_the_target_first(
    llm: LLM, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folders = {}
    for method in METHODS:
        folders[method] = tmp_path_factory.mktemp(method) / "head"
        save_drafter(make_drafter(llm.target, method), folders[method])
    loaded = load_contenders(llm, folders)
    assert [contender.drafting for contender in loaded] == [
        Drafting(),
        *(Drafting(method, "auto", lookup=True) for method in METHODS),
    ]
    assert [c.drafter and c.drafter.config.method for c in loaded] == [None, *METHODS]


def test_device_name_says_how_many_cores() -> None:
    assert device_name()
