"""The blocks of KV cache that requests use: reference counts, and prefix caching by content.

A block holds `size` tokens, of the target and of the drafter alike. Drafter slot i reads token
i + 1, so the key of a block is its own tokens *and the next one*, after the block before it. A
cached block serves both models: the drafter at once if it has run the block, too (`drafted`), else
from the features that are kept with it.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import takewhile

ROOT = 0  # prefix id before a first block

Key = tuple[int, tuple[int, ...]]  # prefix id of the block before, the block's tokens and the next


class BlockPool:
    """`count` blocks of `size` tokens. A block without users is free. A free block keeps its
    content, and can be found by it, until it is allocated again."""

    def __init__(self, count: int, size: int) -> None:
        self.count = count
        self.size = size
        self._ref_counts = [0] * count
        self._free = OrderedDict.fromkeys(range(count))  # least recently used first
        self._cached = dict[Key, int]()  # blocks that can be found
        self._keys = dict[int, Key]()  # key of each of these blocks
        self._prefix_ids = dict[int, int]()  # prefix ids of these blocks, never used again
        self._last_prefix_id = ROOT
        self._drafted = set[int]()  # blocks whose slots the drafter has run

    @property
    def free(self) -> int:
        """The number of blocks that can be allocated."""
        return len(self._free)

    def blocks(self, tokens: int) -> int:
        """The number of blocks that hold some tokens."""
        return -(-tokens // self.size)

    def allocate(self, count: int) -> list[int]:
        """Free blocks, each with one user now."""
        assert count <= self.free, "the scheduler allocates only what is free"
        taken = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            self._forget(block)
            self._ref_counts[block] = 1
            taken.append(block)
        return taken

    def release(self, blocks: Sequence[int]) -> None:
        """Remove one user of each block. The last blocks of a request are allocated first: without
        the ones before them they could not be found."""
        for block in reversed(blocks):
            self._ref_counts[block] -= 1
            assert self._ref_counts[block] >= 0, f"block {block} is free already"
            if not self._ref_counts[block]:
                self._free[block] = None
                if block not in self._keys:
                    self._free.move_to_end(block, last=False)  # it holds nothing worth keeping

    def find(self, tokens: Sequence[int]) -> tuple[list[int], int]:
        """The longest run of cached blocks that `tokens` begin with, and the prefix id of all their
        tokens. Each block gets one more user. At least one token is left over."""
        found = list[int]()
        prefix_id = ROOT
        for end in range(self.size, len(tokens), self.size):
            block = self._cached.get((prefix_id, tuple(tokens[end - self.size : end + 1])))
            if block is None:
                break
            prefix_id = self._prefix_ids[block]
            self._ref_counts[block] += 1
            self._free.pop(block, None)
            found.append(block)
        return found, prefix_id

    def remember(self, block: int, before: int, tokens: Iterable[int]) -> int:
        """Let a full block be found by its `size` tokens and the next one, after prefix `before`.
        Returns its prefix id, or that of an equal block that is cached already."""
        key = before, tuple(tokens)
        assert len(key[1]) == self.size + 1
        cached = self._cached.get(key)
        if cached is not None:
            return self._prefix_ids[cached]
        self._last_prefix_id += 1
        self._cached[key] = block
        self._keys[block] = key
        self._prefix_ids[block] = self._last_prefix_id
        return self._last_prefix_id

    def mark_drafted(self, blocks: Iterable[int]) -> None:
        """Note that the drafter has run all slots of some blocks."""
        self._drafted.update(blocks)

    def drafted(self, blocks: Iterable[int]) -> int:
        """The number of a request's first blocks that the drafter has run."""
        return sum(1 for _ in takewhile(self._drafted.__contains__, blocks))

    def _forget(self, block: int) -> None:
        self._drafted.discard(block)
        if key := self._keys.pop(block, None):
            del self._cached[key]
            del self._prefix_ids[block]
