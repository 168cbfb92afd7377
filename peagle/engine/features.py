"""The target's features of running requests, until the drafter takes them up."""

from torch import Tensor

from peagle.engine.kv_cache import Span, places, zeros


class FeatureCache:
    """Features (blocks · size, F·E) in the blocks that hold the same tokens' keys, allocated at the
    first write. A drafter may so be any number of slots behind its target, and a block that is
    found by its content brings the features of what the drafter has not run yet."""

    def __init__(self, blocks: int, size: int) -> None:
        self.blocks, self.size = blocks, size
        self._kept: Tensor | None = None

    def keep(self, spans: list[Span], features: Tensor) -> None:
        """Features (T, F·E) of packed tokens; rejected ones are overwritten, never read."""
        if self._kept is None:
            self._kept = zeros((self.blocks * self.size, features.shape[1]), features)
        at = places(spans, self.size, features.device)
        if isinstance(at, slice):
            self._kept[at] = features
        else:
            self._kept.index_copy_(0, at, features)

    def read(self, span: Span) -> Tensor:
        """(length, F·E)"""
        assert self._kept is not None, "the target has run these tokens"
        return self._kept[places([span], self.size, self._kept.device)]
