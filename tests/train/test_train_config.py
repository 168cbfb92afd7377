"""Settings of a training run: bad values, and the learning rate that they make."""

from pathlib import Path

import pytest
from refusals import refused

from peagle.train.config import COUNTS, TrainConfig
from peagle.train.optimizer import rate


@pytest.mark.parametrize(
    ("name", "values"),
    [
        *((name, (0, -5)) for name in COUNTS.split()),
        *((name, (0.0, -1e-3, float("nan"))) for name in ("lr", "correction_lr")),
        *((name, (0.0, 1.2)) for name in ("ratio", "decay")),
        ("cooldown", (-0.1, 1.5)),
        ("warmup", (-0.1, 1)),
        ("seed", (2**40, -(2**40))),
    ],
)
def test_bad_settings(name: str, values: tuple[float, ...]) -> None:
    for value in values:
        with refused(name):
            TrainConfig(Path(), **{name: value})  # type: ignore[arg-type]


def test_rate_rises_stays_and_falls() -> None:
    assert [rate(s, 1000, 0.01, 0.2) for s in (0, 4, 9)] == pytest.approx([0.1, 0.5, 1.0])
    assert {rate(s, 1000, 0.01, 0.2) for s in range(9, 801)} == {1.0}
    assert [rate(s, 1000, 0.01, 0.2) for s in (900, 999)] == pytest.approx([0.5, 1 / 200])
    assert rate(0, 1, 0.01, 0.2) == pytest.approx(1.0)
    assert [rate(s, 100, 0, 1) for s in (0, 50)] == pytest.approx([1.0, 0.5])
    assert rate(99, 100, 0, 0) == 1.0, "without a cool-down"
