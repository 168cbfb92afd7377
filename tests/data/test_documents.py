"""Documents of a data file are tokenised once, and mapped: no process holds their tokens."""

import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from json_files import write_lines
from refusals import refused
from safetensors import SafetensorError
from tiny import make_tokenizer, random_prompts

from peagle.data import dataset
from peagle.data.dataset import mixed, read_examples
from peagle.data.documents import Documents
from peagle.data.example import Example
from peagle.errors import InputWarning
from peagle.train.batches import Batches

TOKENIZER = make_tokenizer()
DOCUMENTS = [
    Example([1, 2, *ids], [False] * 2 + [True] * len(ids)) for ids in random_prompts(9, seed=3)
]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PEAGLE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "documents"


@pytest.fixture
def tokenised(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The records that were tokenised."""
    found = list[dict[str, Any]]()
    tokenise = dataset.documents_of

    def counted(record: dict[str, Any], *rest: Any) -> Any:
        found.append(record)
        return tokenise(record, *rest)

    monkeypatch.setattr(dataset, "documents_of", counted)
    return found


def write(file: Path, documents: list[Example], *more: object) -> Path:
    records = [{"prompt_ids": e.ids[:2], "answer_ids": e.ids[2:]} for e in documents]
    return write_lines(file, *records, *more)


def test_a_file_is_tokenised_once(tmp_path: Path, tokenised: list[Any]) -> None:
    file = write(tmp_path / "data.jsonl", DOCUMENTS)
    for _ in range(2):
        assert list(read_examples(file, TOKENIZER, 99)) == DOCUMENTS
    assert len(tokenised) == len(DOCUMENTS)
    other = make_tokenizer()
    other.chat_template = "{{ messages }}"
    for tokenizer, length in ((other, 99), (TOKENIZER, 5)):
        found = list(read_examples(file, tokenizer, length))
        assert found == [Example(e.ids[:length], e.supervised[:length]) for e in DOCUMENTS]
    assert len(tokenised) == 3 * len(DOCUMENTS)
    write(file, DOCUMENTS[::-1])
    assert list(read_examples(file, TOKENIZER, 99)) == DOCUMENTS[::-1]


def test_several_files_are_found_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset, "FILE", 1)
    files = [
        write(tmp_path / name, part)
        for name, part in zip("ab", (DOCUMENTS[:3], DOCUMENTS[3:]), strict=True)
    ]
    read = [read_examples(file, TOKENIZER, 99) for file in files]
    whole = Documents([part for each in read for part in each.parts])
    assert len(whole.parts) == len(DOCUMENTS)
    assert list(whole) == DOCUMENTS
    some = whole.only([7, 0, 3]).only([2, 0])
    assert list(some) == [DOCUMENTS[3], DOCUMENTS[7]]


def test_a_process_holds_no_tokens(tmp_path: Path) -> None:
    """Python's memory grows by the places of documents, less than a byte for each token."""
    long = [Example([1] * 2000, [False] * 2 + [True] * 1998) for _ in range(100)]
    file = write(tmp_path / "data.jsonl", long)
    read_examples(file, TOKENIZER, 4096)
    tracemalloc.start()
    try:
        mapped = read_examples(file, TOKENIZER, 4096)
        tokens = sum(len(example.ids) for example in mapped)
        held, _ = tracemalloc.get_traced_memory()
        lists = list(mapped)
        as_lists, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert tokens == 200_000 == sum(len(example.ids) for example in lists)
    assert held < tokens
    assert as_lists > 16 * tokens


@pytest.mark.parametrize("pack", [None, 4096])
def test_an_epoch_holds_a_few_bytes_of_each_document(tmp_path: Path, pack: int | None) -> None:
    """However long documents are."""

    def held(count: int, length: int) -> int:
        made = Example([1] * length, [False] * 2 + [True] * (length - 2))
        documents = read_examples(write(tmp_path / "d", [made] * count), TOKENIZER, 4096)
        tracemalloc.start()
        try:
            batches = Batches(documents.only(range(count)), batch=1, pack=pack, seed=0)
            batches.sequence(batches.sequences(1) - 1)
            return tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()

    short, long, more = held(500, 40), held(500, 400), held(1500, 40)
    assert abs(long - short) < 5000
    assert more - short < 1000 * 48  # four arrays, and what these have in reserve


def test_a_file_is_read_a_part_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory does not grow with a file, however long its documents are."""
    monkeypatch.setattr(dataset, "FILE", 20_000)

    def peak(count: int, length: int) -> int:
        made = Example([1] * length, [False] * 2 + [True] * (length - 2))
        file = write(tmp_path / "d", [made] * count)
        tracemalloc.start()
        try:
            read_examples(file, TOKENIZER, 4096)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert peak(120, 2000) < 1.2 * peak(30, 2000)
    assert peak(30, 2000) < 2 * peak(300, 200)


def test_what_is_left_out_is_told_at_every_start(tmp_path: Path, tokenised: list[Any]) -> None:
    file = write(tmp_path / "data.jsonl", DOCUMENTS * 3, {"text": "x"})
    for _ in range(2):
        with pytest.warns(InputWarning, match="1 of 28 records cannot be used"):
            read_examples(file, TOKENIZER, 99)
    assert len(tokenised) == 28
    with refused():
        read_examples(file, TOKENIZER, 99, strict=True)


def test_nothing_is_kept_of_what_cannot_be_read_or_written(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise SafetensorError("No space left on device (os error 28)")

    with refused():
        read_examples(write(tmp_path / "bad.jsonl", DOCUMENTS, [1]), TOKENIZER, 99)
    with monkeypatch.context() as patch:
        patch.setattr(dataset, "save_file", full)
        with refused("data") as error:
            read_examples(write(tmp_path / "data.jsonl", DOCUMENTS), TOKENIZER, 99)
    assert "make room" in str(error.value.fix)
    assert {path.suffix for path in cache.iterdir()} == {".lock"}
    assert len(read_examples(tmp_path / "data.jsonl", TOKENIZER, 99)) == len(DOCUMENTS)


def test_the_fix_of_a_damaged_part_makes_all_parts_again(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a part alone, its documents would be missing unnoticed."""
    monkeypatch.setattr(dataset, "FILE", 1)
    file = write(tmp_path / "data.jsonl", DOCUMENTS)
    read_examples(file, TOKENIZER, 99)
    [folder] = (path for path in cache.iterdir() if path.is_dir())
    part = sorted(folder.glob("*.safetensors"))[4]
    part.write_bytes(part.read_bytes()[:50])
    with refused() as error:
        list(read_examples(file, TOKENIZER, 99))
    assert error.value.value == part and "delete its folder" in str(error.value.fix)
    shutil.rmtree(part.parent)
    assert list(read_examples(file, TOKENIZER, 99)) == DOCUMENTS


def test_records_are_mixed_by_weight_and_seed() -> None:
    sources = [(range(1000), 3.0), (range(1000, 2000), None)]
    found = mixed(sources, 5)
    first = [record for record in found if record < 1000]
    assert first == list(range(1000)), "the first source ends it"
    assert 1200 < len(found) < 1480
    assert [record for record in found if record >= 1000] == [*range(1000, len(found))]
    assert mixed(sources, 5) == found != mixed(sources, 6)
