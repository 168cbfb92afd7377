"""Acceptance of a head on the target's own answers, without decoding them again: the walk.

Greedy decoding accepts a draft token exactly where it is the answer's own. So one training forward
over every anchor of an answer has the drafts of all rounds that decoding could run, and the rounds
that it does run are found by walking: from an anchor over what it accepts and one token more, to
the next anchor. Example: the answer is "the cat sat on a mat", the newest token "the", and a chain
of 3 gives "cat sat in": two are accepted, "on" is the target's, and the next round begins there.

Shapes: N tokens, E elements, K draft tokens, D drafter hidden.
"""

from collections.abc import Iterator
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from peagle.data.example import Example, Examples
from peagle.engine.request import Stats
from peagle.methods.base import Elements
from peagle.methods.keys import default_k
from peagle.methods.registry import method_of
from peagle.model.drafter import Drafter
from peagle.model.target import Target
from peagle.train.batches import PackedDocuments
from peagle.train.passes import run_document, run_drafter
from peagle.train.trainer import States

HELD_OUT = 64  # documents, at most a tenth, that training leaves for measurements
LOGIT_ROWS = 512  # rows of logits that exist at once


class Round(NamedTuple):
    """One round of decoding."""

    newest: int  # index in the document of the token that the draft follows
    accepted: int  # draft tokens; none of them after the answer's end


def hold_out(data: Examples) -> tuple[list[int], list[int]]:
    """Keep documents from training, spread evenly over the data: at most HELD_OUT and a tenth.
    Returns the numbers of those to train on, and of those to measure on.

    Of the latter, documents whose prompt occurs among those to train on are not measured.
    """
    count = min(HELD_OUT, len(data) // 10)
    chosen = {number * len(data) // count for number in range(count)}
    train = [number for number in range(len(data)) if number not in chosen]
    prompts = {number: tuple(prompt_of(data[number])) for number in sorted(chosen)}
    seen = set(prompts.values()).intersection(tuple(prompt_of(data[number])) for number in train)
    return train, [number for number, prompt in prompts.items() if prompt not in seen]


def prompt_of(example: Example) -> list[int]:
    """Ids before the first answer."""
    return example.ids[: example.supervised.index(True)]


class Walk:
    """Documents whose answers are the target's own, with the target's features of them.

    `states` returns the target's output for documents by their numbers, as captured ones have it;
    without it the target runs over each document once.
    """

    def __init__(self, target: Target, documents: Examples, states: States | None = None) -> None:
        self.target = target
        self.documents = documents
        self.states = states
        # By document and layers; on the CPU, since together they may take gigabytes.
        self._features = dict[tuple[int, tuple[int, ...]], Tensor]()

    def rounds(self, drafter: Drafter, k: int) -> list[list[Round]]:
        """The rounds of each document with chains of k."""
        numbered = enumerate(self.documents)
        return [_walk(example, self._accepted(drafter, number, k)) for number, example in numbered]

    @torch.no_grad()
    def _accepted(self, drafter: Drafter, number: int, k: int) -> list[int]:
        """For each newest token, the right draft tokens up to the first wrong one.

        The drafter runs given the true tokens before each element. A chain is drafted given its own
        tokens: as long as they are right, these are the true ones.
        """
        example = self.documents[number]
        device = self.target.device
        ids = torch.tensor(example.ids + [0] * k, device=device)  # drafts may pass the end
        one = torch.zeros_like(ids)
        sequence = PackedDocuments(ids, one.bool(), one)
        features = self._target_features(number, drafter.config.feature_layers)
        anchor, depth = elements = _elements(example, k, device)
        normed = run_drafter(drafter, sequence, features, elements)
        predicted = anchor + depth + 2
        method = method_of(drafter.config)
        right = torch.zeros(k, len(example.ids), dtype=torch.int64, device=device)
        for part in torch.arange(len(anchor), device=device).split(LOGIT_ROWS):
            logits = method.logits(drafter, normed[part], ids[predicted[part] - 1])
            best = drafter.target_ids[logits.max(-1).indices]
            right[depth[part], anchor[part]] = (best == ids[predicted[part]]).long()
        return [0, *right.cumprod(0).sum(0).tolist()]

    def _target_features(self, number: int, layers: tuple[int, ...]) -> Tensor:
        if self.states is not None:
            return self.states([number], self.target).features
        if (number, layers) not in self._features:
            output = run_document(self.target, self.documents[number].ids, layers)
            self._features[number, layers] = output.features.cpu()
        return self._features[number, layers].to(self.target.device)


def _elements(example: Example, k: int, device: torch.device) -> Elements:
    """Depth 0 of all anchors; each further depth of those that answers are drafted from."""
    first = torch.arange(len(example.ids) - 1, device=device)
    anchors = [newest - 1 for start, end in _answers(example) for newest in range(start, end - 1)]
    deeper = torch.tensor(anchors, dtype=torch.int64, device=device)
    depths = torch.arange(1, k, device=device).repeat_interleave(len(anchors))
    anchor = torch.cat([first, deeper.repeat(k - 1)])
    return Elements(anchor, torch.cat([torch.zeros_like(first), depths]))


def _answers(example: Example) -> Iterator[tuple[int, int]]:
    """Begin and end of each answer; the token before an answer is the prompt's."""
    at = 0
    for written, run in groupby(example.supervised):
        length = len(list(run))
        if written and at:
            yield at, at + length
        at += length


def _walk(example: Example, accepted: list[int]) -> list[Round]:
    """The rounds over a document; `accepted`: draft tokens accepted after each newest token."""
    rounds = []
    for start, end in _answers(example):
        newest = start
        while newest < end - 1:
            rounds.append(Round(newest, min(accepted[newest], end - 1 - newest)))
            newest += rounds[-1].accepted + 1
    return rounds


def stats(rounds: list[list[Round]], k: int) -> Stats:
    """Acceptance over documents, with chains of k."""
    each = [one.accepted for document in rounds for one in document]
    return Stats(len(each), k * len(each), [sum(a > depth for a in each) for depth in range(k)])


def acceptance(walk: Walk, drafter: Drafter) -> Stats:
    """Acceptance of chains as long as the head was trained for."""
    k = default_k(drafter.config)
    return stats(walk.rounds(drafter, k), k)
