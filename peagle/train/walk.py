"""Acceptance of a head on the target's own answers, without decoding them again: the walk.

Greedy decoding accepts a draft token exactly where it is the answer's own. So one training forward
over every anchor of an answer has the drafts of all rounds that decoding could run, and the rounds
that it does run are found by walking: from an anchor over what it accepts and one token more, to
the next anchor. Example: the answer is "the cat sat on a mat", the newest token "the", and a chain
of 3 gives "cat sat in": two are accepted, "on" is the target's, and the next round begins there.

Shapes: N tokens, E elements, K draft tokens, D drafter hidden.
"""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from functools import partial
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from peagle.data.example import Example
from peagle.engine.budget import Calibration
from peagle.engine.corrected import Drafted, correction_table
from peagle.engine.draft import SIBLINGS, Scorer
from peagle.engine.request import Stats
from peagle.engine.tree import grow
from peagle.methods.base import Elements
from peagle.methods.keys import default_k
from peagle.methods.registry import method_of
from peagle.model.drafter import Drafter
from peagle.model.target import Target
from peagle.train.drafter_pass import run_drafter
from peagle.train.sequence import Sequence
from peagle.train.target_pass import run_target
from peagle.train.trainer import States

HELD_OUT = 64  # documents, at most a tenth, that training leaves for measurements
LOGIT_ROWS = 512  # rows of logits that exist at once


class Round(NamedTuple):
    """One round of decoding."""

    newest: int  # index in the document of the token that the draft follows
    accepted: int  # draft tokens; none of them after the answer's end


class HeldOut(NamedTuple):
    """Numbers of documents: to train on, and to measure on."""

    train: list[int]
    measured: list[int]


def hold_out(data: list[Example]) -> HeldOut:
    """Keep documents from training, spread evenly over the data: at most HELD_OUT and a tenth.

    Of these, documents whose prompt occurs among those to train on are not measured.
    """
    count = min(HELD_OUT, len(data) // 10)
    chosen = {number * len(data) // count for number in range(count)}
    train = [number for number in range(len(data)) if number not in chosen]
    seen = {tuple(prompt_of(data[number])) for number in train}
    measured = [number for number in sorted(chosen) if tuple(prompt_of(data[number])) not in seen]
    return HeldOut(train, measured)


def prompt_of(example: Example) -> list[int]:
    """Ids before the first answer."""
    return example.ids[: example.supervised.index(True)]


class Walk:
    """Documents whose answers are the target's own, and what the target makes of them.

    `states` returns the target's output for documents by their numbers, as captured ones have it;
    without it the target runs over each document once.
    """

    def __init__(
        self, target: Target, documents: list[Example], states: States | None = None
    ) -> None:
        self.target = target
        self.documents = documents
        self.states = states
        self._features = dict[tuple[int, tuple[int, ...]], Tensor]()  # by document and layers

    def chains(self, drafter: Drafter, ks: Many[int]) -> list[list[list[Round]]]:
        """For each k of `ks`, the rounds of each document with chains of k."""
        found: list[list[list[Round]]] = [[] for _ in ks]
        for number, example in enumerate(self.documents):
            hits = self._drafts(drafter, number, max(ks)).hits(drafter)
            for rounds, k in zip(found, ks, strict=True):
                accepted = [0, *hits.clamp(max=k).tolist()]  # by the newest token
                rounds.append(_walk(example, accepted.__getitem__))
        return found

    def trees(self, drafter: Drafter, nodes: int) -> list[list[Round]]:
        """The rounds of each document with trees of `nodes`, of a parallel head without lookup, as
        an engine has them that decodes one document after another."""
        trees = _Trees(drafter, nodes)
        found = []
        for number, example in enumerate(self.documents):
            drafts = self._drafts(drafter, number, trees.k)
            found.append(_walk(example, partial(trees.accepted, drafts)))
        return found

    @torch.no_grad()
    def _drafts(self, drafter: Drafter, number: int, k: int) -> "_Drafts":
        """The drafter over every anchor of a document, and k depths after those in answers."""
        example, device = self.documents[number], self.target.device
        length = len(example.ids)
        ids = torch.tensor(example.ids + [0] * k, device=device)  # drafts may pass the end
        one = torch.zeros_like(ids)
        sequence = Sequence(ids, one.bool(), one)
        elements = _elements(example, k, device)
        features = self._target_features(number, sequence, length, drafter.config.feature_layers)
        normed = run_drafter(drafter, sequence, features, elements)
        rows = torch.full((k, length), -1, device=device)
        rows[elements.depth, elements.anchor] = torch.arange(len(normed), device=device)
        return _Drafts(ids, rows, normed)

    def _target_features(
        self, number: int, sequence: Sequence, length: int, layers: tuple[int, ...]
    ) -> Tensor:
        if (number, layers) not in self._features:
            if self.states is None:
                document = Sequence(*(part[:length] for part in sequence))
                output = run_target(self.target, document, layers)
            else:
                output = self.states([number], self.target)
            self._features[number, layers] = output.features
        return self._features[number, layers]


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


def _walk(example: Example, accepted: Callable[[int], int]) -> list[Round]:
    """The rounds over a document; `accepted`: draft tokens accepted after the newest token."""
    rounds = []
    for start, end in _answers(example):
        newest = start
        while newest < end - 1:
            rounds.append(Round(newest, min(accepted(newest), end - 1 - newest)))
            newest += rounds[-1].accepted + 1
    return rounds


class _Drafts(NamedTuple):
    """The drafter's states of a document, given the true tokens before each element."""

    ids: Tensor  # (N + K,) with zeros after the document
    rows: Tensor  # (K, N) of `normed`, by depth and anchor; −1 where there is none
    normed: Tensor  # (E, D)

    @torch.no_grad()
    def hits(self, drafter: Drafter) -> Tensor:
        """(N,) right draft tokens from each anchor on, up to the first wrong one. A chain is
        drafted given its own tokens: as long as they are right, these are the true ones."""
        depth, anchor = (self.rows >= 0).nonzero().unbind(-1)
        predicted = anchor + depth + 2
        method = method_of(drafter.config)
        right = torch.zeros_like(self.rows)
        for part in torch.arange(len(anchor), device=anchor.device).split(LOGIT_ROWS):
            at = depth[part], anchor[part]
            before = self.ids[predicted[part] - 1]
            best = method.logits(drafter, self.normed[self.rows[at]], before).max(-1).indices
            right[at] = (drafter.target_ids[best] == self.ids[predicted[part]]).long()
        return right.cumprod(0).sum(0)


class _Trees:
    """Draft trees as the engine grows them."""

    def __init__(self, drafter: Drafter, nodes: int) -> None:
        method, table = method_of(drafter.config), correction_table(drafter)
        self.k, self.nodes = default_k(drafter.config), nodes
        self.calibration = Calibration()
        self.scorer = Scorer(method, drafter, table, SIBLINGS, self.calibration)

    @torch.no_grad()
    def accepted(self, drafts: _Drafts, newest: int) -> int:
        """Nodes of the tree after the newest token that the document follows."""
        states = drafts.normed[drafts.rows[:, newest - 1]]
        drafted = Drafted(states, [range(self.k)], [int(drafts.ids[newest])])
        [offer] = self.scorer.trees(drafted, [None])
        draft = grow(offer, self.nodes)
        true = drafts.ids[newest + 1 : newest + 1 + self.k].tolist()
        true += [-1] * (self.k + 1 - len(true))
        path = draft.path([true[depth] for depth in draft.depths()])
        self.calibration.count(draft, path)
        return len(path)


def stats(rounds: list[list[Round]], k: int) -> Stats:
    """Acceptance over documents, of drafts at most k deep."""
    each = [one.accepted for document in rounds for one in document]
    return Stats(len(each), k * len(each), [sum(a > depth for a in each) for depth in range(k)])


def acceptance(walk: Walk, drafter: Drafter) -> Stats:
    """Acceptance of chains as long as the head was trained for."""
    k = default_k(drafter.config)
    [rounds] = walk.chains(drafter, [k])
    return stats(rounds, k)
