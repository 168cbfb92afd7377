"""Which blocks of KV cache belong to whom: reference-counted, and full ones found by content.

A block holds `size` tokens, of the target and of the drafter alike. Drafter slot i reads token
i + 1, so what a block holds is decided by its own tokens *and the next one*: that is its key,
behind the block before it. A block found this way serves both as if it had been computed: the
drafter at once where it has run the block, too (`drafted`), else from the features kept with it.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import takewhile

BLOCK = 16  # tokens of a block
ROOT = 0  # content id of nothing: what a first block stands behind

Key = tuple[int, tuple[int, ...]]  # content id of the block before, tokens and the one behind them


class BlockPool:
    """`count` blocks of `size` tokens. A block is free when nobody uses it; a free one keeps its
    content, and can be found by it, until it is needed for something else."""

    def __init__(self, count: int, size: int) -> None:
        self.count, self.size = count, size
        self._users = [0] * count
        self._free = OrderedDict.fromkeys(range(count))  # least recently used first
        self._found: dict[Key, int] = {}
        self._key: dict[int, Key] = {}  # of blocks that can be found
        self._content: dict[int, int] = {}  # of the same: content ids, never used again
        self._contents = ROOT
        self._drafted = set[int]()  # blocks whose slots the drafter has run

    @property
    def free(self) -> int:
        """Blocks that can be allocated."""
        return len(self._free)

    def blocks(self, tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-tokens // self.size)

    def allocate(self, count: int, behind: int | None = None) -> list[int]:
        """Blocks with one user each, one behind the other where that is possible: keys that lie so
        are read without a copy."""
        assert count <= self.free, "the scheduler allocates only what is free"
        taken = []
        for _ in range(count):
            following = None if behind is None else behind + 1
            block = following if following in self._free else next(iter(self._free))
            assert block is not None
            del self._free[block]
            self._forget(block)
            self._users[block] = 1
            taken.append(behind := block)
        return taken

    def release(self, blocks: Sequence[int]) -> None:
        """One user less. The last blocks of a request are the first to be used for others: without
        those before them they could not be found."""
        for block in reversed(blocks):
            self._users[block] -= 1
            assert self._users[block] >= 0, f"block {block} is free already"
            if not self._users[block]:
                self._free[block] = None
                if block not in self._key:
                    self._free.move_to_end(block, last=False)  # nothing is lost with it

    def find(self, tokens: Sequence[int]) -> tuple[list[int], int]:
        """The longest run of known blocks that `tokens` begin with, each with one more user, and
        the content id of the last. At least one token is left over."""
        found, content = list[int](), ROOT
        for end in range(self.size, len(tokens), self.size):
            block = self._found.get((content, tuple(tokens[end - self.size : end + 1])))
            if block is None:
                break
            content = self._content[block]
            self._users[block] += 1
            self._free.pop(block, None)
            found.append(block)
        return found, content

    def remember(self, block: int, before: int, tokens: Iterable[int]) -> int:
        """A full block can be found from now on by its `size` tokens and the next, behind content
        `before`. Returns its content id; that of an equal block where one is known."""
        key = before, tuple(tokens)
        assert len(key[1]) == self.size + 1
        known = self._found.get(key)
        if known is not None:
            return self._content[known]
        self._contents += 1
        self._found[key], self._key[block] = block, key
        self._content[block] = self._contents
        return self._contents

    def mark_drafted(self, blocks: Iterable[int]) -> None:
        """The drafter has run all slots of these."""
        self._drafted.update(blocks)

    def drafted(self, blocks: Iterable[int]) -> int:
        """How many of a request's first blocks the drafter has run."""
        return sum(1 for _ in takewhile(self._drafted.__contains__, blocks))

    def _forget(self, block: int) -> None:
        self._drafted.discard(block)
        if key := self._key.pop(block, None):
            del self._found[key], self._content[block]
