"""What a forward costs at so many rows, measured on the models themselves when an engine starts."""

import time
from collections.abc import Callable

import torch

from peagle.engine.blocks import BLOCK
from peagle.engine.depth import PROMPT, Curve, measure
from peagle.engine.forward import forward
from peagle.engine.kv_cache import KVCache, Span
from peagle.model.drafter import Drafter, DrafterOutput
from peagle.model.target import Target


def verify_curve(target: Target, most: int) -> Curve:
    """Seconds of the target and its output head, up to `most` rows; in tiles where it has them."""
    cache, spans = _room(most)

    @torch.no_grad()
    def run(rows: int) -> None:
        tile = target.row_tile if target.row_tile > 1 else rows
        ids = torch.zeros(tile, dtype=torch.int64, device=target.device)
        for _ in range(-(-rows // tile)):
            out = forward(target.forward, cache, spans(tile), ids, tiled=target.row_tile > 1)
            target.logits(out.hidden).max(-1).indices.tolist()

    return measure(_timed(run), most)


def draft_curve(drafter: Drafter, most: int) -> Curve:
    """Seconds of one drafter forward, every row of it predicting, up to `most` rows, and of one
    over a prompt, of which no more rows than that predict."""
    (cache, spans), weight = _room(max(most, PROMPT)), drafter.norm.weight

    @torch.no_grad()
    def run(rows: int) -> None:
        ids = torch.zeros(rows, dtype=torch.int64, device=weight.device)
        features = drafter.project(weight.new_zeros(rows, drafter.config.feature_width))
        out: DrafterOutput = forward(drafter, cache, spans(rows), ids, features)
        drafter.draft_tokens(out.normed[:most]).tolist()

    return measure(_timed(run), most, PROMPT)


def _room(most: int) -> tuple[KVCache, Callable[[int], list[Span]]]:
    """A cache for `most` rows, and the span of so many."""
    blocks = range(-(-most // BLOCK) + 1)
    return KVCache(len(blocks), BLOCK), lambda rows: [Span(blocks, 0, rows)]


def _timed(run: Callable[[int], None]) -> Callable[[int], float]:
    """Seconds of a call that ends with its result on the CPU."""

    def seconds(rows: int) -> float:
        started = time.perf_counter()
        run(rows)
        return time.perf_counter() - started

    return seconds
