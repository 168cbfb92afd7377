"""Summarise a data file, and show which of its tokens are trained on."""

from collections.abc import Iterator
from itertools import groupby, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from peagle.data.dataset import documents_of
from peagle.data.example import Example
from peagle.data.records import read_records
from peagle.errors import InputError
from peagle.model.template import check_template

PERCENTILES = (0, 10, 50, 90, 99, 100)
MAX_REASONS = 5


class Piece(NamedTuple):
    """Neighbouring tokens that are all supervised, or all not."""

    text: str
    supervised: bool


def summarize(
    path: Path, tokenizer: PreTrainedTokenizerBase, max_length: int | None = None
) -> dict[str, Any]:
    """Read a data file as training does, and count: records and the documents that can be trained
    on, their tokens and answer tokens, those that are cut, percentiles of their lengths before the
    cut, unusable records and the first reasons.

    Raises InputError for a line that is not JSON, or a conversation without a chat template.
    """
    counts = dict.fromkeys(("records", "documents", "tokens", "answer_tokens", "cut"), 0)
    lengths: list[int] = []
    reasons: list[str] = []
    for record in read_records(path):
        counts["records"] += 1
        if "answer_ids" not in record:
            check_template(tokenizer)  # it is not the record that is at fault
        try:
            documents = documents_of(record, tokenizer, max_length)
        except InputError as error:
            reasons.append(f"record {counts['records']}: {error}")
            continue
        for whole, used in documents:
            lengths.append(len(whole.ids))
            counts["documents"] += 1
            counts["cut"] += len(used.ids) < len(whole.ids)
            counts["tokens"] += len(used.ids)
            counts["answer_tokens"] += sum(used.supervised)
    if not counts["records"]:
        raise InputError("no records: the file is empty", value=path)
    ranked = np.percentile(lengths or [0], PERCENTILES, method="nearest").tolist()
    shares = {f"p{percent}": n for percent, n in zip(PERCENTILES, ranked, strict=True)}
    found = {"lengths": shares, "unusable": len(reasons), "reasons": reasons[:MAX_REASONS]}
    return counts | found


def nth_record(path: Path, number: int) -> dict[str, Any]:
    """Return record `number` of a file, counted from 1 as errors do."""
    for record in islice(read_records(path), number - 1, None):
        return record
    raise InputError(f"{path} has fewer records", field="record", value=number)


def pieces(example: Example, tokenizer: PreTrainedTokenizerBase) -> Iterator[Piece]:
    """Split a document's text, special tokens included, where supervision begins or ends."""
    pairs = zip(example.ids, example.supervised, strict=True)
    for supervised, run in groupby(pairs, key=lambda pair: pair[1]):
        yield Piece(tokenizer.decode([token for token, _ in run]), supervised)
