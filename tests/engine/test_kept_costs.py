"""Costs of forwards outlive the process that measured them, and bad files do no harm."""

import gc
import json
from pathlib import Path

import pytest
import torch
from test_cache_memory import Counting
from tiny import make_target

from peagle.backends.torch import TorchBackend
from peagle.engine import costs as measured_costs
from peagle.engine import shared
from peagle.engine.adaptive import AdaptiveBudget
from peagle.engine.costs import Curve, kept_curve, measure
from peagle.engine.llm import LLM
from peagle.engine.params import SamplingParams
from peagle.model.drafter import Drafter
from peagle.model.target import Target

CPU = torch.device("cpu")
MEASURED = {1: 0.01, 2: 0.02}


@pytest.fixture(autouse=True)
def costs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of costs of an empty cache."""
    monkeypatch.setenv("PEAGLE_HOME", str(tmp_path))
    return tmp_path / "costs"


def measured() -> Curve:
    return Curve(dict(MEASURED))


def not_measured() -> Curve:
    pytest.fail("measured again")


def only_file(costs: Path) -> Path:
    [file] = costs.iterdir()
    return file


def opened(target: Target, drafter: Drafter | None) -> tuple[LLM, Counting]:
    """An LLM with an engine, as another process makes it, and its target's model."""
    ready = shared.SharedTarget(target)
    ready.model = counting = Counting(ready.model)
    llm = LLM(ready, drafter, max_batch=2)
    assert llm.engine
    return llm, counting


def test_the_second_start_runs_no_forward(
    target: Target, p_eagle: Drafter, monkeypatch: pytest.MonkeyPatch, costs: Path
) -> None:
    _, first = opened(target, p_eagle)
    assert first.seen
    assert len(list(costs.iterdir())) == 2, "the target's and the drafter's"
    monkeypatch.setattr(measured_costs, "draft_curve", lambda *_: pytest.fail("measured again"))
    _, second = opened(target, p_eagle)
    assert not second.seen


@pytest.mark.parametrize("ratio", [0.1, 10])
def test_an_engines_end_keeps_lower_costs(target: Target, costs: Path, ratio: float) -> None:
    """Higher ones may be those of a busy machine, on which the next run would not draft."""
    llm, counting = opened(target, None)
    file = only_file(costs)
    before = json.loads(file.read_text())
    llm.generate([[70, 71]], SamplingParams(max_tokens=8))
    budget = llm.engine.budget
    assert isinstance(budget, AdaptiveBudget)
    budget.verify.scale(ratio)
    learnt = list(budget.verify.seconds)
    del llm, counting, budget
    gc.collect()
    kept = learnt if ratio < 1 else list(before.values())
    assert list(json.loads(file.read_text()).values()) == kept


def test_a_bad_measurement_is_corrected_by_later_runs(costs: Path) -> None:
    """Ten times too slow, as when the machine was busy: three short runs mend it."""
    for _ in range(3):
        curve = kept_curve([1, 2], ["model"], CPU, measured).copy()
        for _ in range(15):
            curve.observe([1], MEASURED[1] / 10)
        del curve
    assert json.loads(only_file(costs).read_text())["1"] < MEASURED[1] / 5


def test_measuring_leaves_torch_its_threads() -> None:
    """Native code takes some from it where other processes use the cores."""

    def taking(rows: int) -> float:
        torch.set_num_threads(1)
        if rows > 2:
            raise MemoryError
        return float(rows)

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert measure(taking, [1, 2]).seconds == [1.0, 2.0]
        assert torch.get_num_threads() == 2
        with pytest.raises(MemoryError):
            measure(taking, [4])
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_others_are_measured(monkeypatch: pytest.MonkeyPatch, costs: Path) -> None:
    kept_curve([1, 2], ["model"], CPU, measured)
    assert kept_curve([1, 2], ["model"], CPU, not_measured).curve.seconds == [0.01, 0.02]
    kept_curve([1, 2], ["other"], CPU, measured)
    kept_curve([1, 2, 4], ["model"], CPU, lambda: Curve({**MEASURED, 4: 0.03}))
    for owner, name, value in (
        (measured_costs, "fingerprint", lambda *_: "other"),
        (measured_costs, "_device_name", lambda *_: "other"),
        (measured_costs, "__version__", "other"),
        (torch, "get_num_threads", lambda: 99),
    ):
        with monkeypatch.context() as other:
            other.setattr(owner, name, value)
            kept_curve([1, 2], ["model"], CPU, measured)
    assert len(list(costs.iterdir())) == 7, "each is measured, and has a file"


@pytest.mark.parametrize("changed", ["size", "dtype", "quantize", "backend", "rows"])
def test_the_key_has_all_that_decides(changed: str, costs: Path) -> None:
    target, rows, backend = make_target(), 4, None

    def start() -> None:
        made = shared.SharedTarget(target, backend=backend)
        made.verify_curve(rows)

    start()
    if changed == "size":
        target = make_target(layers=target.num_layers + 1)
    elif changed == "dtype":
        target = Target(target.model.to(torch.bfloat16), target.tokenizer, target.name)
    elif changed == "quantize":
        target.quantize = "int8"
    elif changed == "backend":
        backend = TorchBackend()
    else:
        rows = 5
    start()
    assert len(list(costs.iterdir())) == 2


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"\xff", b"[]", b"null", b"{}", b"[" * 100_000, b'{"1": 0.01}',
        b'{"1": 0.01, "2": NaN}', b'{"1": 0.01, "2": Infinity}', b'{"1": 0.01, "2": 0.0}',
        b'{"1": -0.01, "2": 0.02}', b'{"1": 0.01, "2": "0.02"}', b'{"1": 0.01, "2": null}',
        b'{"1": 0.01, "3": 0.02}', b'{"2": 0.02, "1": 0.01}',
        b'{"1": 0.01, "2": 1' + b"0" * 400 + b"}",
    ],
)  # fmt: skip
def test_a_damaged_file_is_measured_anew(content: bytes, costs: Path) -> None:
    kept_curve([1, 2], ["model"], CPU, measured)
    file = only_file(costs)
    file.write_bytes(content)
    assert kept_curve([1, 2], ["model"], CPU, measured).curve.seconds == [0.01, 0.02]
    assert json.loads(file.read_text()) == {"1": 0.01, "2": 0.02}


def test_a_folder_in_place_of_the_file_is_no_error(costs: Path) -> None:
    kept_curve([1, 2], ["model"], CPU, measured)
    file = only_file(costs)
    file.unlink()
    file.mkdir()
    assert kept_curve([1, 2], ["model"], CPU, measured).curve.seconds == [0.01, 0.02]


@pytest.mark.parametrize("blocked", ["home", "costs"])
def test_an_unwritable_cache_is_no_error(
    blocked: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, target: Target
) -> None:
    """A file stands where a folder must be made, which stops root, too."""
    home = tmp_path / "home"
    if blocked == "costs":
        home.mkdir()
    (home / "costs" if blocked == "costs" else home).write_text("")
    monkeypatch.setenv("PEAGLE_HOME", str(home))
    llm, counting = opened(target, None)
    assert counting.seen
    assert llm.generate([[70, 71]], SamplingParams(max_tokens=4))
    del llm
    gc.collect()
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.read_text()]
