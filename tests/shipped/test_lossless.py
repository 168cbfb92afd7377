"""`benchmarks/lossless.py` on a few tokens, and the differences that it permits."""

from pathlib import Path

import pytest


@pytest.fixture
def lossless(benchmark_script):
    return benchmark_script("lossless")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "methods", "ways"),  # a chain and trees of each; the target alone, in a batch
    [
        ("float32", ("p-eagle",), 4 + 1),
        ("float32-sampled", ("p-eagle",), 2 + 1),
        ("exact", ("eagle3", "p-eagle"), 2 * 4 + 1),
        ("exact-sampled", ("p-eagle",), 2 + 1),
    ],
)
def test_output_is_the_targets_own(
    lossless, part: str, methods: tuple[str], ways: int, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(lossless, "METHODS", methods)
    line = f"--only {part} --limit 8 --max-tokens 32 --batch 8"
    args = lossless.parse([*line.split(), "--output", str(tmp_path / "lossless.json")])
    rows = lossless.measure(args)
    assert len(rows) == ways
    assert [row for row in rows if lossless.wrong(row)] == []
    lengths = [row["acceptance_length"] for row in rows if row["method"] != "none"]
    assert min(lengths) > 1.2, "a trained head is accepted more often than this"
    assert lossless.measure(args) == rows, "a second call measures nothing again"


@pytest.mark.parametrize(
    ("part", "passes"),
    [("float32", True), ("float32-sampled", False), ("exact", False), ("exact-sampled", False)],
)
def test_only_greedy_float32_may_have_ties(lossless, part: str, passes: bool) -> None:
    tie, other = {"tie": True}, {"tie": False}
    row = {"part": part, "differences": [tie, other]}
    assert lossless.wrong(row) == ([other] if passes else [tie, other])
