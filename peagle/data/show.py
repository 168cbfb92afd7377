"""What is in a data file, and what of it is trained on."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from peagle.data.dataset import read_records, teaches, to_examples
from peagle.data.example import Example
from peagle.errors import InputError
from peagle.model.template import check_template

PERCENTILES = (0, 10, 50, 90, 99, 100)
FIRST = 5  # unusable records that are named


@dataclass(frozen=True, slots=True)
class Summary:
    """A data file in numbers."""

    records: int
    documents: int  # that can be trained on
    tokens: int  # in them
    answer_tokens: int  # of those, supervised
    cut: int  # documents longer than --max-length
    lengths: dict[str, int]  # percentile → tokens of a document, before it is cut
    kinds: dict[str, int]  # records of each kind, where they say so
    unusable: int  # records
    reasons: list[str]  # for the first of them


class Piece(NamedTuple):
    """Neighbouring tokens that are all supervised, or all not."""

    text: str
    supervised: bool


def summarize(
    path: Path, tokenizer: PreTrainedTokenizerBase, max_length: int | None = None
) -> Summary:
    """Read a whole data file as training does, and count. Raises InputError for a line that is not
    JSON, or a conversation when there is no chat template; other records that cannot be trained on
    are counted instead."""
    kinds, lengths, reasons = Counter[str](), list[int](), list[str]()
    tokens = answers = records = unusable = 0
    for number, record in enumerate(read_records(path), start=1):
        records = number
        kinds[str(record.get("kind", ""))] += 1
        if "answer_ids" not in record:
            check_template(tokenizer)  # it is not the record that is at fault
        try:
            documents = documents_of(record, tokenizer, max_length)
        except InputError as error:
            unusable += 1
            reasons += [f"record {number}: {error}"] if len(reasons) < FIRST else []
            continue
        for whole, used in documents:
            lengths.append(len(whole.ids))
            tokens += len(used.ids)
            answers += sum(used.supervised)
    if not records:
        raise InputError(f"{path}: no records")
    return Summary(
        records,
        len(lengths),
        tokens,
        answers,
        sum(length > (max_length or length) for length in lengths),
        percentiles(lengths),
        {} if set(kinds) == {""} else dict(kinds.most_common()),
        unusable,
        reasons,
    )


def percentiles(lengths: list[int]) -> dict[str, int]:
    """The value below or at which so many percent lie, by the nearest rank."""
    ranked = sorted(lengths)
    last = len(ranked) - 1
    return {f"p{p}": ranked[round(last * p / 100)] for p in PERCENTILES} if ranked else {}


def nth_record(path: Path, number: int) -> dict[str, Any]:
    """Record `number` of a file, counted from 1 as errors do."""
    found = 0
    for found, record in enumerate(read_records(path), start=1):
        if found == number:
            return record
    raise InputError(f"--record {number}: {path} has records 1 to {found}")


def documents_of(
    record: dict[str, Any], tokenizer: PreTrainedTokenizerBase, max_length: int | None = None
) -> list[tuple[Example, Example]]:
    """Documents of a record that can be trained on: whole, and as training cuts them.

    Raises InputError when there is none.
    """
    whole = to_examples(record, tokenizer)
    largest = max(token for example in whole for token in (*example.ids, 0))
    if largest >= len(tokenizer):
        raise InputError(f"token id {largest} is not the target's: is it another's answer?")
    cut = [Example(ids[:max_length], said[:max_length]) for ids, said in whole]
    usable = [(w, c) for w, c in zip(whole, cut, strict=True) if teaches(c)]
    if not usable:
        limit = f" within --max-length {max_length} tokens" if max_length else ""
        raise InputError(f"no answer{limit} to train on")
    return usable


def pieces(example: Example, tokenizer: PreTrainedTokenizerBase) -> Iterator[Piece]:
    """The document's text, special tokens included, split where supervision begins or ends."""
    pairs = zip(example.ids, example.supervised, strict=True)
    for supervised, run in groupby(pairs, key=lambda pair: pair[1]):
        yield Piece(tokenizer.decode([token for token, _ in run]), supervised)
