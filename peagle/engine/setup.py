"""The parts of an LLM, and the engine made of them."""

import warnings
from dataclasses import dataclass
from functools import cached_property

from peagle.backends.batch import BLOCK, blocks_of
from peagle.engine.adaptive import AdaptiveBudget
from peagle.engine.budget import Budget
from peagle.engine.costs import Curve
from peagle.engine.draft import Proposer
from peagle.engine.drafting import Drafting
from peagle.engine.engine import Engine, Settings
from peagle.engine.memory import default_max_batch, kv_tokens
from peagle.engine.shared import SharedTarget
from peagle.errors import InputError, InputWarning
from peagle.methods.keys import default_k
from peagle.model.drafter import Drafter

# Prompt tokens of a round in which requests decode. On a CPU more of them take longer, but not less
# time for each.
MIXED_CHUNKS = {"cpu": 128, "cuda": 512}


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
        for name, value in {"max_batch": self.asked_batch, "kv_tokens": self.kv_tokens}.items():
            if value is not None and value < 1:
                raise InputError("must be at least 1", field=name, value=value)
        if self.drafter is None:
            return
        self.shared.target.check_layers(self.drafter.config.feature_layers)
        trained = self.drafter.config.depths
        if trained is not None and self.k > trained:
            why = f"K = {self.k}, but the head was trained for {trained} draft tokens"
            # Level 1: one line of code, so Python shows it once however often K changes.
            warnings.warn(f"{why}: later ones will rarely be accepted", InputWarning, stacklevel=1)

    @property
    def k(self) -> int:
        """Maximum depth of the head's drafts; 0 without a head."""
        if self.drafter is None:
            return 0
        return self.drafting.chain or default_k(self.drafter.config)

    @cached_property
    def max_batch(self) -> int:
        """Requests that run together."""
        target = self.shared.target
        return self.asked_batch or default_max_batch(target, self.drafter, self.kv_tokens)

    @property
    def engine(self) -> Engine:
        """The engine: made when it is first needed, once for all threads."""
        with self.shared.lock:
            return self._engine

    @cached_property
    def _engine(self) -> Engine:
        target = self.shared.target
        nodes = self.drafting.max_nodes
        longest = target.max_context + max(self.k, nodes or 0) + BLOCK
        room = kv_tokens(target, self.drafter, self.max_batch * longest, self.kv_tokens)
        settings = Settings(
            self.max_batch,
            room,
            self.k,
            nodes,
            self.drafting.lookup,
            mixed_chunk=MIXED_CHUNKS[target.device.type],
        )
        proposer = None
        if self.drafter is not None:
            proposer = self.shared.proposer(self.drafter, blocks_of(room))
        return Engine(target, self.shared.model, settings, self._budget(proposer), proposer)

    def _budget(self, proposer: Proposer | None) -> Budget:
        if self.drafting.mode != "auto":
            return Budget(self.k)
        max_rows = self.max_batch + max(self.max_batch * self.k, self.drafting.max_nodes or 0)
        verify = self.shared.verify_curve(max_rows)
        if proposer is None or self.drafter is None:
            return AdaptiveBudget(lambda *_: [], 0, verify, Curve({1: 0.0}))
        draft = self.shared.draft_curve(proposer.model, self.drafter, max_rows)
        return AdaptiveBudget(proposer.method.passes, self.k, verify, draft)
