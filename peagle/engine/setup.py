"""Parts of an LLM, the size of its caches, and its engine."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from peagle.backends.batch import BLOCK, blocks_of
from peagle.engine.adaptive import AdaptiveBudget
from peagle.engine.budget import Budget
from peagle.engine.costs import Curve
from peagle.engine.draft import Proposer
from peagle.engine.drafting import Drafting
from peagle.engine.engine import Engine, Settings
from peagle.engine.shared import SharedTarget
from peagle.errors import InputError, InputWarning, check_at_least
from peagle.methods.keys import default_k
from peagle.model.attention import HeadShape
from peagle.model.base_target import BaseTarget
from peagle.model.drafter import Drafter
from peagle.model.tensors import free_memory

# Prompt tokens of a round in which requests decode. On a CPU more of them take longer, but not less
# time for each.
MIXED_CHUNKS = {"cpu": 128, "cuda": 512}
SHARE = {"cpu": 0.5, "cuda": 0.85}  # share of free memory; a CPU has other things to do
MAX_BATCH = {"cpu": 8, "cuda": 64}  # by default
MIN_TOKENS = 512  # KV cache for each request of a default batch, where the context is longer


@dataclass(frozen=True, eq=False)
class Setup:
    """A target, a head, and the requested settings. It never changes.

    Raises InputError for settings and heads that do not fit.
    """

    shared: SharedTarget
    drafter: Drafter | None
    drafting: Drafting
    asked_batch: int | None  # None: by device and memory
    kv_tokens: int | None  # None: by free memory

    def __post_init__(self) -> None:
        check_at_least(1, max_batch=self.asked_batch, kv_tokens=self.kv_tokens)
        if self.drafter is None:
            return
        self.target.check_layers(self.drafter.config.feature_layers)
        trained = self.drafter.config.depths
        if trained is not None and self.k > trained:
            why = f"K = {self.k}, but the head was trained for {trained} draft tokens"
            # Level 1: one line of code, so Python shows it once however often K changes.
            warnings.warn(f"{why}: later ones will rarely be accepted", InputWarning, stacklevel=1)

    @property
    def target(self) -> BaseTarget:
        return self.shared.target

    @property
    def k(self) -> int:
        """Maximum depth of the head's drafts; 0 without a head."""
        if self.drafter is None:
            return 0
        return self.drafting.k or default_k(self.drafter.config)

    @cached_property
    def max_batch(self) -> int:
        """Requests that run together."""
        return self.asked_batch or default_max_batch(self.target, self.drafter, self.kv_tokens)

    @property
    def engine(self) -> Engine:
        """The engine: made when it is first needed, once for all threads."""
        with self.shared.lock:
            return self._engine

    @property
    def context(self) -> int:
        """Tokens of the longest request that can run, with its answer: the target's context, or
        those that there is KV cache for."""
        scheduler = self.engine.scheduler
        if scheduler.max_blocks(self.target.max_context) <= scheduler.pool.count:
            return self.target.max_context
        return scheduler.pool.count * BLOCK - scheduler.num_lookahead_tokens

    @cached_property
    def _engine(self) -> Engine:
        target = self.target
        nodes = self.drafting.max_nodes
        longest = target.max_context + max(self.k, nodes or 0) + BLOCK
        room = kv_tokens(target, self.drafter, self.max_batch * longest, self.kv_tokens)
        chunk = MIXED_CHUNKS[target.device.type]
        settings = Settings(self.max_batch, room, chunk, self.k, nodes, self.drafting.lookup)
        proposer = None
        if self.drafter is not None:
            proposer = self.shared.proposer(self.drafter, blocks_of(room))
        return Engine(target, self.shared.model, settings, self._budget(proposer), proposer)

    def _budget(self, proposer: Proposer | None) -> Budget:
        if not self.drafting.adaptive:
            return Budget(self.k)
        max_rows = self.max_batch + max(self.max_batch * self.k, self.drafting.max_nodes or 0)
        verify = self.shared.verify_curve(max_rows)
        if proposer is None or self.drafter is None:
            return AdaptiveBudget(lambda *_: [0.0], 0, verify, Curve({1: 0.0}))
        draft = self.shared.draft_curve(proposer.model, self.drafter, max_rows)
        return AdaptiveBudget(proposer.method.passes, self.k, verify, draft)


def token_bytes(target: BaseTarget, drafter: Drafter | None) -> int:
    """Bytes that the caches keep of a token: the target's keys and values, the drafter's, and the
    features it drafts from."""
    kept = _numbers(target.kv_shapes) * target.dtype.itemsize
    if drafter is None:
        return kept
    features = drafter.config.feature_width * target.dtype.itemsize
    return kept + features + _numbers(drafter.kv_shapes) * drafter.norm.weight.element_size()


def _numbers(shapes: Sequence[HeadShape]) -> int:
    """Numbers in keys and values of one token, in all layers."""
    return sum(shape.heads * (shape.key_size + shape.value_size) for shape in shapes)


def default_max_batch(target: BaseTarget, drafter: Drafter | None, wanted: int | None) -> int:
    """Requests decoded together, where no number is given: at most 8 on a CPU, 64 on a GPU.

    A CPU is busy with a few rows, so more requests only slow each other down. A GPU reads the
    weights once for all rows, so many requests cost little more than one. There are fewer, but at
    least one, where the KV cache (`wanted` tokens, or what fits into free memory) would leave each
    less than 512 tokens: requests that run out of cache are started again.
    """
    device = target.device
    room = int(SHARE[device.type] * free_memory(device) / token_bytes(target, drafter))
    fitting = (wanted or room) // min(MIN_TOKENS, target.max_context)
    return max(1, min(MAX_BATCH[device.type], fitting))


def kv_tokens(target: BaseTarget, drafter: Drafter | None, useful: int, wanted: int | None) -> int:
    """Tokens of KV cache: as `wanted`, else `useful` or as many as fit.

    Raises InputError when they do not fit.
    """
    share = SHARE[target.device.type]
    each = token_bytes(target, drafter)
    free = free_memory(target.device)
    room = int(share * free / each)
    if wanted is not None and wanted > room:
        allowed = f"{share:.0%} of the free memory is {share * free / 2**30:.1f} GiB"
        why = f"needs {wanted * each / 2**30:.1f} GiB, {allowed}"
        raise InputError(why, field="kv_tokens", value=wanted, fix=f"give at most {room}")
    if room < 256:
        why = f"{free / 2**30:.1f} GiB of memory is free next to the model"
        why += f", a token of KV cache takes {each / 2**20:.2f} MiB"
        raise InputError(why, fix="use a smaller dtype or target, or free memory")
    return wanted or min(room, useful)
