"""A target made ready to decode, which several LLMs share."""

import threading
from functools import cached_property, partial
from typing import Any

import torch

from peagle.backends.base import Backend, DrafterModel
from peagle.backends.choose import choose_backend, read_target
from peagle.backends.kv_cache import FeatureCache, KVCache
from peagle.engine import costs
from peagle.engine.corrected import correction_table
from peagle.engine.draft import Proposer
from peagle.engine.grammars import Grammars
from peagle.errors import InputError
from peagle.methods.registry import method_of
from peagle.model.base_target import BaseTarget
from peagle.model.drafter import Drafter


class SharedTarget:
    """A target made ready to decode. All LLMs over it share it, and nothing here changes."""

    def __init__(
        self,
        target: str | BaseTarget,  # one given by name is loaded first
        quantize: str | None = None,  # "int8" or "int4": weights of its layers, on a CPU
        backend: Backend | None = None,
        *,
        deterministic: bool = False,
        **load: Any,
    ) -> None:
        """Raises InputError as `load_target` does, and for settings that do not fit."""
        if deterministic and backend is not None:
            fix = "make the `backend` with exact=True instead"
            raise InputError("a given backend has its own mode", field="deterministic", fix=fix)
        if isinstance(target, str):
            made = read_target(target, quantize, native=backend is None, **load)
        else:
            refuse_settings(quantize=quantize, **load)
            made = target
        self.target = made
        self.backend = backend or choose_backend(made.device, made.dtype, exact=deterministic)
        self._sizes = weight_sizes(made)  # before the backend replaces weights
        self.model = self.backend.target(made, own=isinstance(target, str))
        self.grammars = Grammars(made)
        self.lock = threading.Lock()  # held while an engine is made
        self._verify: costs.KeptCurve | None = None  # for the largest count so far

    def verify_curve(self, max_rows: int) -> costs.Curve:
        """Costs of the target, up to `max_rows` rows: a copy for one engine, which corrects it."""
        if self._verify is None or self._verify.curve.rows[-1] < max_rows:
            target = self.target
            decisive = (type(self.model), self._sizes, target.dtype, target.quantize)
            measure = partial(costs.verify_curve, target, self.model, max_rows)
            rows = costs.row_counts(max_rows)
            self._verify = costs.kept_curve(rows, decisive, target.device, measure)
        return self._verify.copy()

    def draft_curve(self, model: DrafterModel, drafter: Drafter, max_rows: int) -> costs.Curve:
        """Costs of a drafter, up to `max_rows` rows, for one engine, which corrects them."""
        weights = drafter.state_dict().items()
        shapes = [(name, weight.shape, weight.dtype) for name, weight in weights]
        measure = partial(costs.draft_curve, model, max_rows)
        rows = costs.row_counts(max_rows, costs.PROMPT_ROWS)
        return costs.kept_curve(rows, (type(model), shapes), self.target.device, measure).copy()

    @cached_property
    def max_characters(self) -> int:
        """Characters of the longest prompt that could fit, a bound before it is tokenised. It takes
        0.3 s for Gemma's vocabulary, and no token is shorter than a character."""
        assert self.target.tokenizer is not None
        longest = max(map(len, self.target.tokenizer.get_vocab()))
        return self.target.max_context * longest

    def proposer(self, drafter: Drafter, blocks: int) -> Proposer:
        """A proposer with empty caches of `blocks` blocks."""
        target = self.target
        weight = drafter.norm.weight
        cache = KVCache(blocks, drafter.kv_shapes, weight.dtype, target.device)
        features = FeatureCache(blocks, drafter.config.feature_width, target.dtype, target.device)
        model = self.backend.drafter(drafter)
        table = correction_table(drafter)
        return Proposer(method_of(drafter.config), model, cache, features, table)


def refuse_settings(**given: object) -> None:
    """Raises InputError for settings of a target that is made already; None and False are none."""
    for name, value in given.items():
        if value not in (None, False):
            raise InputError("the target is loaded already", field=name, fix="give its name")


def weight_sizes(target: BaseTarget) -> list[tuple[str, torch.Size]]:
    """Names and shapes of a target's weights."""
    found = [("embedding", target.embedding.shape)]
    for layer in range(target.num_layers):
        found += [(name, weight.shape) for name, weight in target.layer_weights(layer).items()]
    return found
