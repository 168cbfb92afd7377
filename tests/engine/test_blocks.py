"""The block pool conserves blocks, and finds only what was put there."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from peagle.engine.blocks import ROOT, BlockPool

SIZE, COUNT = 3, 7


class Pool(RuleBasedStateMachine):
    """Requests come, grow, are remembered and go; a model knows what each holds."""

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.held, self.content = BlockPool(COUNT, SIZE), list[list[int]](), {}

    @rule(count=st.integers(0, 4))
    def allocate(self, count: int) -> None:
        if count > self.pool.free:
            with pytest.raises(AssertionError):
                self.pool.allocate(count)
            return
        taken = self.pool.allocate(count)
        assert len(set(taken)) == count and not set(taken) & {b for h in self.held for b in h}
        for block in taken:  # what they held cannot be found any more
            self.content = {key: at for key, at in self.content.items() if at != block}
        self.held.append(taken)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        which = data.draw(st.integers(0, len(self.held) - 1))
        self.pool.release(self.held.pop(which))

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=3 * SIZE + 1))
    def find(self, tokens: list[int]) -> None:
        found, _ = self.pool.find(tokens)
        assert len(found) * SIZE < len(tokens)
        for number, block in enumerate(found):
            assert self.content[tuple(tokens[: (number + 1) * SIZE + 1])] == block
        after = tuple(tokens[: (len(found) + 1) * SIZE + 1])
        assert after not in self.content or len(after) <= (len(found) + 1) * SIZE
        self.held.append(found)

    @precondition(lambda self: any(self.held))
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1), min_size=10, max_size=10))
    def remember(self, data: st.DataObject, tokens: list[int]) -> None:
        """A request's blocks, in their order, as far as they are not known by other content."""
        held = data.draw(st.sampled_from([h for h in self.held if h]))
        content = ROOT
        for number, block in enumerate(held[:3]):
            key = tuple(tokens[: (number + 1) * SIZE + 1])
            if block in self.content.values() and self.content.get(key) != block:
                return
            content = self.pool.remember(block, content, key[number * SIZE :])
            self.content.setdefault(key, block)

    @invariant()
    def blocks_are_free_or_held(self) -> None:
        held = {block for blocks in self.held for block in blocks}
        assert self.pool.free == COUNT - len(held)


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_the_block_unused_for_longest_is_allocated() -> None:
    pool = BlockPool(5, 4)
    assert pool.allocate(3) == [0, 1, 2]
    assert pool.allocate(2) == [3, 4]
    content = pool.remember(1, ROOT, range(5))
    pool.remember(0, content, range(5))
    pool.release([1])
    pool.release([0])
    pool.release([4])
    assert pool.allocate(3) == [4, 1, 0], "first the block that holds nothing"


def test_the_next_token_is_part_of_a_block() -> None:
    """Drafter slot i reads token i + 1: with another one behind it, a block is not the same."""
    pool = BlockPool(8, 2)
    blocks = pool.allocate(2)
    pool.release(blocks) if (first := pool.remember(blocks[0], ROOT, [5, 6, 7])) else None
    assert pool.find([5, 6, 7, 8]) == ([blocks[0]], first)
    assert pool.find([5, 6, 9, 8]) == ([], ROOT)
    assert pool.find([5, 6]) == ([], ROOT), "one token has to be run"


def test_the_end_of_a_request_is_forgotten_first() -> None:
    pool, content = BlockPool(4, 1), ROOT
    blocks = pool.allocate(3)
    for at, block in enumerate(blocks):
        content = pool.remember(block, content, [at, at + 1])
    pool.release(blocks)
    pool.allocate(2)  # the block never used, then the last of the three
    assert pool.find([0, 1, 2, 3])[0] == blocks[:2]


@given(st.integers(0, 100), st.integers(1, 9))
def test_blocks_of_tokens(tokens: int, size: int) -> None:
    blocks = BlockPool(1, size).blocks(tokens)
    assert (blocks - 1) * size < tokens <= blocks * size or tokens == blocks == 0
