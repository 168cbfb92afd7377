"""A target that is made ready to decode, and its heads: what several LLMs share."""

import threading
from typing import Any

from peagle.backends.base import Backend
from peagle.backends.choose import choose_backend
from peagle.backends.cpu.library import NoCompiler
from peagle.backends.cpu.quantized import check_quantize, quantize
from peagle.backends.kv_cache import FeatureCache, KVCache
from peagle.engine.budget import Curve
from peagle.engine.corrected import correction_table
from peagle.engine.costs import WatchedCurve, verify_curve
from peagle.engine.draft import Proposer
from peagle.engine.grammars import Grammars
from peagle.errors import InputError
from peagle.methods.registry import method_of
from peagle.model.drafter import Drafter
from peagle.model.loader import load_target, resolve_device
from peagle.model.target import Target


class SharedTarget:
    """A target that is ready to decode: what all LLMs over it share. Nothing here changes."""

    def __init__(
        self, target: Target, *, own: bool, deterministic: bool, backend: Backend | None = None
    ) -> None:
        """`own`: nobody else has this target."""
        self.target = target
        self.backend = backend or choose_backend(target.device, target.dtype, exact=deterministic)
        self.model = self.backend.target(target, own=own)
        self.grammars = Grammars(target)
        self.lock = threading.Lock()  # held while an engine is made
        self._verify: Curve | None = None  # measured once, for the most rows so far

    def verify_curve(self, most: int) -> Curve:
        """What the target costs, up to `most` rows: a copy that its engine corrects."""
        if self._verify is None or self._verify.rows[-1] < most:
            self._verify = verify_curve(self.target, self.model, most)
        return WatchedCurve(self._verify)

    def proposer(self, drafter: Drafter, blocks: int) -> Proposer:
        """A proposer with empty caches of so many blocks."""
        target = self.target
        weight = drafter.norm.weight
        cache = KVCache(blocks, drafter.kv_shapes, weight.dtype, target.device)
        features = FeatureCache(blocks, drafter.config.feature_width, target.dtype, target.device)
        method, model = method_of(drafter.config), self.backend.drafter(drafter)
        return Proposer(method, model, cache, features, correction_table(drafter))


def load_quantized(name: str, kind: str, **load: Any) -> Target:
    """A target whose layers hold weights of few bits, on a CPU. Raises InputError as `load_target`
    does, and for an unknown kind or another device."""
    check_quantize(kind, resolve_device(load.get("device", "auto")))
    try:
        return quantize(load_target(name, **load), kind)
    except NoCompiler as error:
        raise InputError(f"quantize {kind!r}: needs native code: {error}") from error
