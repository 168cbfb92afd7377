"""Summarise a data file, and show which of its tokens are trained on."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from peagle.data.dataset import documents_of, read_records
from peagle.data.example import Example
from peagle.errors import InputError
from peagle.model.template import check_template

PERCENTILES = (0, 10, 50, 90, 99, 100)
MAX_REASONS = 5


@dataclass(slots=True)
class Summary:
    """Counts of a data file."""

    records: int = 0
    documents: int = 0  # that can be trained on
    tokens: int = 0  # in documents, cut to `max_length`
    answer_tokens: int = 0  # supervised ones
    cut: int = 0  # documents longer than `max_length`
    lengths: dict[str, int] = field(default_factory=dict)  # percentile → tokens, before the cut
    kinds: dict[str, int] = field(default_factory=dict)  # records of each kind; empty: none has one
    unusable: int = 0  # records
    reasons: list[str] = field(default_factory=list)  # errors of the first unusable records


class Piece(NamedTuple):
    """Neighbouring tokens that are all supervised, or all not."""

    text: str
    supervised: bool


def summarize(
    path: Path, tokenizer: PreTrainedTokenizerBase, max_length: int | None = None
) -> Summary:
    """Read a data file as training does, and count. Records that cannot be trained on are counted,
    too. Raises InputError for a line that is not JSON, or a conversation without a chat template.
    """
    summary = Summary()
    kinds = Counter[str]()
    lengths: list[int] = []
    for number, record in enumerate(read_records(path), start=1):
        summary.records = number
        kinds[str(record.get("kind", ""))] += 1
        if "answer_ids" not in record:
            check_template(tokenizer)  # it is not the record that is at fault
        try:
            documents = documents_of(record, tokenizer, max_length)
        except InputError as error:
            summary.unusable += 1
            if summary.unusable <= MAX_REASONS:
                summary.reasons.append(f"record {number}: {error}")
            continue
        for whole, used in documents:
            lengths.append(len(whole.ids))
            summary.cut += len(used.ids) < len(whole.ids)
            summary.tokens += len(used.ids)
            summary.answer_tokens += sum(used.supervised)
    if not summary.records:
        raise InputError("no records: the file is empty", value=path)
    summary.documents = len(lengths)
    summary.lengths = percentiles(lengths)
    if set(kinds) != {""}:
        summary.kinds = dict(kinds.most_common())
    return summary


def percentiles(lengths: list[int]) -> dict[str, int]:
    """Return the percentiles of lengths by the nearest rank; none of an empty list."""
    if not lengths:
        return {}
    ranked = sorted(lengths)
    last = len(ranked) - 1
    return {f"p{percent}": ranked[round(last * percent / 100)] for percent in PERCENTILES}


def nth_record(path: Path, number: int) -> dict[str, Any]:
    """Return record `number` of a file, counted from 1 as errors do."""
    found = 0
    for found, record in enumerate(read_records(path), start=1):
        if found == number:
            return record
    raise InputError(f"{path} has records 1 to {found}", field="record", value=number)


def pieces(example: Example, tokenizer: PreTrainedTokenizerBase) -> Iterator[Piece]:
    """Split a document's text, special tokens included, where supervision begins or ends."""
    pairs = zip(example.ids, example.supervised, strict=True)
    for supervised, run in groupby(pairs, key=lambda pair: pair[1]):
        yield Piece(tokenizer.decode([token for token, _ in run]), supervised)
