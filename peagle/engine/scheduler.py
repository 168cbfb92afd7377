"""The requests of the next round and their blocks: continuous batching with chunked prefill.

No torch here: requests, block numbers and counts only.
"""

from collections import deque
from typing import NamedTuple

from peagle.engine.blocks import ROOT, BlockPool
from peagle.engine.lookup import Index
from peagle.engine.request import Request
from peagle.engine.tree import Draft
from peagle.errors import InputError


class ScheduledRequest(NamedTuple):
    """The next pending tokens of a request, which the target runs in one round."""

    request: Request
    num_tokens: int
    draft: Draft  # the last of these tokens, when the request decodes

    @property
    def complete(self) -> bool:
        """Nothing is left pending: the round decides the request's next token."""
        return self.num_tokens == self.request.num_pending

    @property
    def decoding(self) -> bool:
        """The round runs the newest token and its draft, and nothing of a prompt."""
        return self.num_tokens == 1 + len(self.draft)


class Scheduler:
    """First come, first served. Every request that decodes runs in every round; the rest of the
    round's `budget` of tokens goes to prompts, in chunks: `mixed_chunk` tokens at most while
    requests decode, which wait that long for their next tokens. A request is admitted when its
    prompt fits into free blocks. When running requests need more blocks, the newest one is
    preempted: it releases its blocks and is computed again later.

    `num_lookahead_tokens`: slots after its tokens that a request's draft may fill. `window`: newest
    positions that a row sees, in any layer; blocks before them are freed while a request runs.
    """

    def __init__(  # noqa: PLR0913 (limits of one round)
        self,
        pool: BlockPool,
        max_batch: int,
        budget: int,
        num_lookahead_tokens: int,
        window: int,
        mixed_chunk: int | None = None,  # None: all of the budget
    ) -> None:
        per_request = num_lookahead_tokens + 1
        assert budget >= max_batch * per_request, "a round holds every request that decodes"
        self.pool = pool
        self.max_batch = max_batch
        self.budget = budget
        self.num_lookahead_tokens = num_lookahead_tokens
        self.mixed_chunk = mixed_chunk or budget
        self.window = max(window, pool.size)  # the block after freed ones is full
        self.waiting = deque[Request]()
        self.running = list[Request]()

    def check(self, tokens: int, index: int) -> None:
        """Raises InputError for a prompt that would not fit, with its answer, if it were alone."""
        if self.max_blocks(tokens) > self.pool.count:
            needed = tokens + self.num_lookahead_tokens
            room = self.pool.count * self.pool.size
            why = f"takes {needed} tokens of context with its answer, the KV cache has {room}"
            fix = "lower `max_tokens` or raise `kv_tokens`"
            raise InputError(why, field=f"prompt[{index}]", fix=fix)

    def max_blocks(self, tokens: int) -> int:
        """The most blocks that a request of `tokens` tokens holds: of a long one, those that a
        window and a round's chunk reach."""
        held = min(tokens, self.window + self.budget + self.pool.size)
        return self.pool.blocks(held + self.num_lookahead_tokens)

    def add(self, request: Request) -> None:
        """Queue a request after all others."""
        self.waiting.append(request)

    def schedule(self) -> list[ScheduledRequest]:
        """The next round. Its requests own the blocks for all that the round writes."""
        scheduled = list[ScheduledRequest]()
        limit = self.num_lookahead_tokens + 1
        decoding = [request for request in self.running if request.num_pending <= limit]
        prompts = [request for request in self.running if request.num_pending > limit]
        room = self.budget
        for request in decoding:
            # An earlier request of this round may have preempted it.
            if request in self.running and self._extend(request):
                scheduled.append(ScheduledRequest(request, request.num_pending, request.draft))
                room -= request.num_pending
        if scheduled:
            room = min(room, self.mixed_chunk)
        for request in prompts:
            if request in self.running:
                room -= self._chunk(request, room, scheduled)
        while self.waiting and room > 0 and len(self.running) < self.max_batch:
            if not self._admit(self.waiting[0]):
                break
            self.running.append(self.waiting.popleft())
            room -= self._chunk(self.running[-1], room, scheduled)
        if not scheduled and self.running:  # prompts hold all the blocks, and none can go on
            self._preempt(self.running[-1])
            return self.schedule()
        return scheduled

    @property
    def load(self) -> int:
        """Requests that run, and those that will as soon as a round has room for their prompts."""
        count = len(self.running)
        free = self.pool.free
        for request in self.waiting:
            free -= self.max_blocks(len(request.tokens))
            if count == self.max_batch or free < 0:
                break
            count += 1
        return count

    def advance(self, request: Request) -> None:
        """Let the blocks that the target has filled be found by their content, and free those
        before the window."""
        size = self.pool.size
        while (end := (request.num_cached_blocks + 1) * size) <= request.num_computed_tokens:
            block = request.blocks[request.num_cached_blocks]
            tokens = request.tokens[end - size : end + 1]
            request.prefix_id = self.pool.remember(block, request.prefix_id, tokens)
            request.num_cached_blocks += 1
        self._free_unseen(request)

    def take_drafter_slots(self, request: Request, limit: int) -> range:
        """The next slots for the drafter to run, at least one and at most `limit`. From now on they
        count as run. Slots of shared blocks that it has run for another request are skipped."""
        size = self.pool.size
        computed = request.num_computed_tokens
        if computed - request.num_drafter_slots > size:
            found = self.pool.drafted(request.blocks) * size
            request.num_drafter_slots = max(request.num_drafter_slots, min(found, computed - 1))
        start = request.num_drafter_slots
        slots = range(start, min(computed, start + limit))
        self.pool.mark_drafted(request.blocks[start // size : slots.stop // size])
        request.num_drafter_slots = slots.stop
        return slots

    def remove(self, request: Request) -> None:
        """Release everything that a request holds: it has ended or was cancelled. What is left of
        it is its answer, which a caller may keep for long."""
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        self._release(request)
        request.seen = Index()
        request.sampler.matcher = None

    def _chunk(self, request: Request, room: int, scheduled: list[ScheduledRequest]) -> int:
        """Schedule as much of a prompt as there is room for; returns the number of tokens."""
        count = min(request.num_pending, room)
        missing = self._missing(request, count)
        if count < 1 or missing > self.pool.free:
            return 0
        request.blocks += self.pool.allocate(missing)
        scheduled.append(ScheduledRequest(request, count, request.draft))
        return count

    def _admit(self, request: Request) -> bool:
        """Let a request run, with the cached blocks that it begins with, if the rest fits."""
        request.blocks, request.prefix_id = self.pool.find(request.tokens)
        request.num_cached_blocks = len(request.blocks)
        request.num_computed_tokens = len(request.blocks) * self.pool.size
        request.num_drafter_slots = self.pool.drafted(request.blocks) * self.pool.size
        self._free_unseen(request)
        held = request.num_cached_blocks - request.num_freed_blocks
        if self.max_blocks(len(request.tokens)) - held > self.pool.free:
            self._release(request)
            return False
        request.num_cached_tokens = request.num_computed_tokens
        return True

    def _extend(self, request: Request) -> bool:
        """Allocate blocks for the pending tokens, preempting the newest requests where needed. The
        newest one gives up its draft first. False when the request itself was preempted."""
        while (missing := self._missing(request, request.num_pending)) > self.pool.free:
            victim = self.running[-1]
            if victim is request and request.draft:
                request.draft = Draft()
                continue
            self._preempt(victim)
            if victim is request:
                return False
        request.blocks += self.pool.allocate(missing)
        return True

    def _missing(self, request: Request, count: int) -> int:
        wanted = self.pool.blocks(request.num_computed_tokens + count + self.num_lookahead_tokens)
        return max(0, wanted - len(request.blocks))

    def _free_unseen(self, request: Request) -> None:
        """Free the blocks before all that the newest computed token sees. The next block takes
        their places: backends may read keys that a mask hides, but not another request's."""
        freed = max(0, request.num_computed_tokens - self.window) // self.pool.size
        self.pool.release(request.blocks[request.num_freed_blocks : freed])
        request.blocks[:freed] = request.blocks[freed : freed + 1] * freed
        request.num_freed_blocks = freed

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._release(request)
        request.preempted += 1
        self.waiting.appendleft(request)

    def _release(self, request: Request) -> None:
        self.pool.release(request.blocks[request.num_freed_blocks :])
        request.blocks = []
        request.num_freed_blocks = 0
        request.num_cached_blocks = 0
        request.prefix_id = ROOT
        request.num_computed_tokens = 0
        request.num_drafter_slots = 0
        request.draft = Draft()
