"""A target that is made ready to decode, and its heads: what several LLMs share."""

import threading

from peagle.backends.base import Backend
from peagle.backends.choose import choose_backend
from peagle.backends.cpu.library import NoCompiler, load
from peagle.backends.cpu.quantized import check_quantize
from peagle.backends.cpu.quantized import quantize as quantize_target
from peagle.backends.kv_cache import FeatureCache, KVCache
from peagle.engine.budget import Curve
from peagle.engine.corrected import correction_table
from peagle.engine.costs import WatchedCurve, verify_curve
from peagle.engine.draft import Proposer
from peagle.engine.grammars import Grammars
from peagle.errors import InputError
from peagle.methods.registry import method_of
from peagle.model.base_target import BaseTarget
from peagle.model.drafter import Drafter
from peagle.model.loader import described_target, load_target, resolve_device


class Loaded:
    """A target that is ready to decode: what all LLMs over it share. Nothing here changes."""

    def __init__(
        self, target: BaseTarget, *, own: bool, deterministic: bool, backend: Backend | None = None
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


def open_target(
    name: str, quantize: str | None = None, *, dtype: str = "auto", device: str = "auto"
) -> BaseTarget:
    """A target that nothing else uses yet, for an engine. Raises InputError as `load_target` does,
    and for quantised weights on another device than the CPU or without native code."""
    device = resolve_device(device)
    check_quantize(quantize, device)
    if device == "cpu" and dtype in ("auto", "float32", "bfloat16") and _is_native(quantize):
        described = described_target(name, dtype, quantize)
        if described is not None:
            return described
    target = load_target(name, dtype=dtype, device=device)
    if quantize is not None:
        quantize_target(target, quantize)
    return target


def _is_native(quantize: str | None) -> bool:
    try:
        load()
    except NoCompiler as error:
        if quantize is not None:
            why = f"needs native code: {error}"
            raise InputError(why, field="quantize", value=quantize) from error
        return False
    return True
