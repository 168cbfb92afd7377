"""The largest logits by a head in int8 first: those of the head itself, to the last bit."""

import math
from dataclasses import dataclass, replace

import pytest
import torch
from tiny import make_drafter, make_target, make_tokenizer, random_prompts
from torch import Tensor, nn

from peagle import LLM, SamplingParams
from peagle.backends.cpu import screen
from peagle.backends.cpu.matrix import GROUP, CpuLinear
from peagle.backends.cpu.screen import MAX_ROWS, Screen, fits_screen
from peagle.backends.cpu.target import NativeTarget
from peagle.model.drafter import Drafter
from peagle.model.target import Target

DTYPES = (torch.float32, torch.bfloat16)
V, E = 1024, 256


@dataclass
class Head:
    """A head, its screen, and how often the head computed all logits."""

    head: CpuLinear
    screen: Screen
    whole: int = 0


def made(weight: Tensor, monkeypatch: pytest.MonkeyPatch) -> Head:
    linear = nn.Linear(weight.shape[1], len(weight), bias=False).to(weight.dtype)
    with torch.no_grad():
        linear.weight.copy_(weight)
    head, rounded = CpuLinear.of(linear), CpuLinear.of(linear, "int8")
    assert isinstance(head, CpuLinear)
    assert isinstance(rounded, CpuLinear)
    found = Head(head, Screen(head, rounded))

    def counted(hidden: Tensor) -> Tensor:
        found.whole += 1
        return CpuLinear.forward(head, hidden)

    monkeypatch.setattr(head, "forward", counted)
    return found


def assert_same(head: Head, hidden: Tensor) -> None:
    """Every row's largest logits are the head's, bit for bit, and stand where they stood."""
    logits, expected = head.screen.logits(hidden), CpuLinear.forward(head.head, hidden)
    assert torch.equal(logits.amax(1), expected.amax(1))
    assert torch.equal(
        logits == logits.amax(1, keepdim=True), expected == expected.amax(1)[:, None]
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 3, MAX_ROWS, MAX_ROWS + 1])
def test_the_largest_are_those_of_the_head(
    rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(rows)
    spread = torch.rand(V, 1) * 4  # long and short outputs
    weight = (torch.randn(V, E) * spread).to(dtype)
    weight[-50:] = weight[:50]  # equal logits, the largest of some rows among them
    head = made(weight, monkeypatch)
    for _ in range(8):
        hidden = torch.randn(rows, E)
        hidden[:, ::40] *= 5  # as models have them
        hidden += 0.2 * weight[torch.randint(0, 50, (rows,))].float()
        assert_same(head, hidden.to(dtype))
    assert head.whole == (8 if rows > MAX_ROWS else 0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_worst_rounding_hides_nothing(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All weights of one output are rounded down by nearly half a scale, all of another one up."""
    whole = torch.randint(1, 3, (E,)).float()
    weight = -torch.ones(V, E)
    weight[7] = whole + 0.484375
    weight[9] = whole + 0.515625
    weight[9, -16:] -= 1  # so that its logit is smaller
    weight[:, 0] = 127.0  # scales are 1
    hidden = torch.ones(1, E, dtype=dtype)
    head = made(weight.to(dtype), monkeypatch)
    rounded = head.screen.rounded(hidden)
    assert rounded[0, 9] - rounded[0, 7] > 0.9 * E
    assert_same(head, hidden)
    assert head.whole == 0


def test_what_inputs_lose_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32 inputs are rounded to bytes, too: what counts for one output to nothing, what
    counts for another one to twice as much."""
    weight, hidden = torch.zeros(V, E), torch.full((1, E), 0.49)
    weight[7, ::2], weight[9, 1::2] = 127.0, 110.0
    weight[:, ::GROUP] = 1.0
    hidden[:, 1::2] = 0.51
    hidden[:, ::GROUP] = 127.0
    head = made(weight, monkeypatch)
    exact = CpuLinear.forward(head.head, hidden)
    rounded = head.screen.rounded(hidden)
    assert exact.argmax() != rounded.argmax()
    assert_same(head, hidden)
    assert head.whole == 0


def test_many_near_ones_are_computed_by_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = (torch.randn(1, E) + 1e-4 * torch.randn(V, E)).bfloat16()
    head = made(weight, monkeypatch)
    assert_same(head, weight[:2] * 3)
    assert head.whole == 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_a_row_that_is_not_finite_stays_so(
    number: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = made(torch.randn(V, E).to(dtype), monkeypatch)
    hidden = torch.randn(2, E).to(dtype)
    hidden[1, 5] = number
    logits = head.screen.logits(hidden)
    assert not logits[1].amax().isfinite()
    expected = CpuLinear.forward(head.head, hidden[:1])
    assert logits[0].argmax() == expected.argmax()


def test_only_large_heads_of_whole_panels_have_one() -> None:
    assert fits_screen(torch.empty(2**18, 256, device="meta"))
    assert not fits_screen(torch.empty(2**17, 256, device="meta"))
    assert not fits_screen(torch.empty(2**18 + 8, 256, device="meta"))
    assert not fits_screen(torch.empty(2**18, 264, device="meta"))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_answers_stay_the_same(
    dtype: torch.dtype, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone and with drafts; who needs all logits gets all of them."""
    target = Target(make_target(V).model.to(dtype), make_tokenizer(), "tiny")
    head = make_drafter(target, "p-eagle").to(dtype)
    prompts = random_prompts(6, vocab=V)
    greedy = SamplingParams(max_tokens=12, ignore_eos=True)
    others = [replace(greedy, logprobs=2), replace(greedy, temperature=1.0, seed=3)]

    def answers(params: SamplingParams, drafter: Drafter | None) -> list[object]:
        llm = LLM(target, drafter, nodes=drafter and 6, lookup=False, deterministic=deterministic)
        assert isinstance(llm.shared.model, NativeTarget)
        assert bool(llm.shared.model.screen) == (screen.MIN_WEIGHTS == 1)
        return [(done.token_ids, done.logprobs) for done in llm.generate(prompts, params)]

    expected = [answers(params, None) for params in (greedy, *others)]
    screened = list[int]()
    whole = Screen.logits
    monkeypatch.setattr(screen, "MIN_WEIGHTS", 1)
    monkeypatch.setattr(
        Screen, "logits", lambda self, hidden: screened.append(len(hidden)) or whole(self, hidden)
    )
    for drafter in (None, head):
        assert answers(greedy, drafter) == expected[0]
        assert screened
        screened.clear()
    assert [answers(params, None) for params in others] == expected[1:]
    assert not screened
