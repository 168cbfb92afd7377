"""Who runs in the next round, and on which blocks: continuous batching with chunked prefill.

No torch here: requests, block numbers and counts only.
"""

from collections import deque
from typing import NamedTuple

from peagle.config import InputError
from peagle.engine.blocks import ROOT, BlockPool
from peagle.engine.request import Request


class Work(NamedTuple):
    """What the target runs of a request: its next so many pending tokens."""

    request: Request
    tokens: int

    @property
    def complete(self) -> bool:
        """Nothing is left pending: the round decides the request's next token."""
        return self.tokens == self.request.left


class Scheduler:
    """First come, first served. Every request that decodes runs in every round; what is left of the
    round's `budget` of tokens goes to prompts, in chunks. A request is admitted when its prompt
    fits into free blocks; when those that run need more, the newest gives its own up and is
    computed again later.

    `reach` is how many slots behind its tokens a request's draft may fill.
    """

    def __init__(self, pool: BlockPool, max_batch: int, budget: int, reach: int) -> None:
        assert budget >= max_batch * (reach + 1), "a round holds every request that decodes"
        self.pool, self.max_batch, self.budget, self.reach = pool, max_batch, budget, reach
        self.waiting, self.running = deque[Request](), list[Request]()

    def check(self, request: Request) -> None:
        """Raises InputError for a request that would not fit if it were alone."""
        tokens = request.prompt_length + request.params.max_tokens + self.reach
        if self.pool.blocks(tokens) > self.pool.count:
            room = self.pool.count * self.pool.size
            raise InputError(
                f"prompt {request.index} needs {tokens} tokens of KV cache with its answer, all of "
                f"it is {room}: lower max_tokens, or raise kv_tokens"
            )

    def add(self, request: Request) -> None:
        """Behind all others."""
        self.waiting.append(request)

    def schedule(self) -> list[Work]:
        """The next round. Its requests own the blocks for all that the round writes."""
        room, works = self.budget, list[Work]()
        for request in [r for r in self.running if r.left <= self.reach + 1]:
            if request in self.running and self._extend(request, request.left):
                works.append(Work(request, request.left))
                room -= request.left
        deciding = {id(work.request) for work in works}
        for request in [r for r in self.running if id(r) not in deciding]:
            room -= self._chunk(request, room, works)
        while self.waiting and room > 0 and len(self.running) < self.max_batch:
            if not self._admit(self.waiting[0]):
                break
            self.running.append(self.waiting.popleft())
            room -= self._chunk(self.running[-1], room, works)
        if not works and self.running:  # prompts hold all the blocks, and none can go on
            self._preempt(self.running[-1])
            return self.schedule()
        return works

    @property
    def load(self) -> int:
        """Requests that run, and those that will as soon as a round has room for their prompts."""
        count, free = len(self.running), self.pool.free
        for request in self.waiting:
            free -= self.pool.blocks(len(request.tokens) + self.reach)
            if count == self.max_batch or free < 0:
                break
            count += 1
        return count

    def advance(self, request: Request) -> None:
        """Let the blocks that the target has filled be found."""
        size = self.pool.size
        for end in range((request.known + 1) * size, request.computed + 1, size):
            block, tokens = request.blocks[request.known], request.tokens[end - size : end + 1]
            request.content = self.pool.remember(block, request.content, tokens)
            request.known += 1

    def undrafted(self, request: Request, most: int) -> range:
        """The next slots that the drafter has to run, one at least. In blocks that requests share
        it may have run them for another one: then they are there."""
        size, behind = self.pool.size, request.computed - request.slots
        if behind > size:
            there = self.pool.drafted(request.blocks) * size
            request.slots = max(request.slots, min(there, request.computed - 1))
        return range(request.slots, min(request.computed, request.slots + most))

    def drafted(self, request: Request, slots: int) -> None:
        """The drafter has run a request's first so many slots."""
        size = self.pool.size
        self.pool.mark_drafted(request.blocks[request.slots // size : slots // size])
        request.slots = slots

    def remove(self, request: Request) -> None:
        """A request that has ended, or is not wanted any more, gives up all it holds."""
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        self._give_up(request)

    def _chunk(self, request: Request, room: int, works: list[Work]) -> int:
        """Schedule as much of a prompt as there is room for; returns how much."""
        count = min(request.left, room)
        missing = self._missing(request, count)
        if count < 1 or missing > self.pool.free:
            return 0
        self._grow(request, missing)
        works.append(Work(request, count))
        return count

    def _admit(self, request: Request) -> bool:
        """Take up what is known of the request's beginning, if the rest fits."""
        found, content = self.pool.find(request.tokens)
        missing = self.pool.blocks(len(request.tokens) + self.reach) - len(found)
        if missing > self.pool.free:
            self.pool.release(found)
            return False
        request.blocks, request.known, request.content = found, len(found), content
        request.computed = request.reused = len(found) * self.pool.size
        request.slots = self.pool.drafted(found) * self.pool.size
        return True

    def _extend(self, request: Request, count: int) -> bool:
        """Blocks for `count` more tokens, the newest requests giving up theirs where needed; False
        when that was the request itself."""
        while (missing := self._missing(request, count)) > self.pool.free:
            victim = self.running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        self._grow(request, missing)
        return True

    def _missing(self, request: Request, count: int) -> int:
        wanted = self.pool.blocks(request.computed + count + self.reach)
        return max(0, wanted - len(request.blocks))

    def _grow(self, request: Request, count: int) -> None:
        last = request.blocks[-1] if request.blocks else None
        request.blocks += self.pool.allocate(count, last)

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._give_up(request)
        request.preempted += 1
        self.waiting.appendleft(request)

    def _give_up(self, request: Request) -> None:
        self.pool.release(request.blocks)
        request.blocks, request.known, request.content = [], 0, ROOT
        request.computed = request.slots = 0
        request.draft, request.sure = [], []
