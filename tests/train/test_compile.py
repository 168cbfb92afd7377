"""Compiled layers train as eager ones do, and are compiled once for all lengths."""

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from tiny import make_drafter, make_target
from torch import Tensor
from torch._dynamo.utils import counters
from torch.nn.attention import flex_attention as flex

from peagle.methods.base import Elements
from peagle.model.drafter import Drafter
from peagle.model.target import Target
from peagle.train import passes
from peagle.train.attention import FlexStep, StepsAttend, block_mask, in_tiles
from peagle.train.batches import PackedDocuments
from peagle.train.elements import sample_elements
from peagle.train.passes import compile_layers, run_target
from peagle.train.processes import rebuilt
from peagle.train.trainee import Trainee

LENGTHS = (80, 61, 100, 150, 47)
pytestmark = pytest.mark.usefixtures("unrounded")


class Gradients(NamedTuple):
    loss: Tensor
    of: dict[str, Tensor]


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    """Drop the compiled code of other tests, and of this one."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def train(target: Target, drafter: Drafter, tokens: int) -> Gradients:
    """A pass over two random documents."""
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.randint(5, 100, (tokens,), generator=generator)
    documents = (torch.arange(tokens) > tokens // 2).long()
    sequence = PackedDocuments(ids, ids > 0, documents)
    segment = sample_elements(*sequence[1:], 8, 0.7, generator)
    drafter.zero_grad()
    trainee = Trainee(drafter, target)
    output = run_target(target, sequence, drafter.config.feature_layers)
    loss = trainee(sequence, output, segment).loss
    loss.backward()
    named = drafter.named_parameters()
    return Gradients(loss.detach(), {n: p.grad.clone() for n, p in named if p.grad is not None})


def assert_same(target: Target, drafter: Drafter, eager: list[Gradients]) -> None:
    for tokens, wanted in zip(LENGTHS, eager, strict=True):
        found = train(target, drafter, tokens)
        torch.testing.assert_close(found.loss, wanted.loss, rtol=1e-5, atol=0)
        assert found.of.keys() == wanted.of.keys()
        for name, gradient in wanted.of.items():
            assert (found.of[name] - gradient).norm() <= 1e-4 * gradient.norm(), name


@pytest.fixture
def target() -> Target:
    return make_target()


@pytest.fixture
def drafter(target: Target) -> Drafter:
    return make_drafter(target, "p-eagle", layers=4).train()


@pytest.mark.slow
def test_gradients_equal_eager_at_every_length(target: Target, drafter: Drafter) -> None:
    """With the compiler that training uses. The CPU's attention stays outside of the graphs."""
    eager = [train(target, drafter, tokens) for tokens in LENGTHS]
    compile_layers(drafter)
    assert_same(target, drafter, eager)
    assert counters["stats"]["unique_graphs"] == 7, "pieces around attention, once for all lengths"


def test_flex_attention_inside_compiled_layers(
    target: Target, drafter: Drafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The graph that CUDA traces, run by its reference: no CPU kernel has its backward."""
    eager = [train(target, drafter, tokens) for tokens in LENGTHS]
    compiler: Any = partial(torch.compile, backend="aot_eager")
    monkeypatch.setattr(torch, "compile", compiler)
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)
    kernel = compiler(flex.flex_attention, dynamic=True)

    def attend(elements: Elements, documents: Tensor, _: None, counts: list[int]) -> StepsAttend:
        tiled, [step] = in_tiles(elements, counts)
        return StepsAttend([FlexStep(block_mask(tiled, documents, step), kernel)])

    monkeypatch.setattr(passes, "_attend", attend)
    compile_layers(drafter)
    assert_same(target, drafter, eager)
    assert counters["stats"]["unique_graphs"] == 2, "layer 0, and one for the three others"
    assert not counters["graph_break"]


def test_the_copy_that_is_measured_runs_its_own_layers(target: Target, drafter: Drafter) -> None:
    compile_layers(drafter)
    copied = rebuilt(drafter, drafter.config, drafter.state_dict()).eval()
    assert not any({"forward", "fuse"} & vars(layer).keys() for layer in copied.layers)
