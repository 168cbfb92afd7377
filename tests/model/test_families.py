"""Our forward of every family equals transformers' own: whole, cached, in blocks and packed; by the
reference backend, and by the one that is chosen here."""

import pytest
import torch
from families import FAMILIES, LEFT, WINDOW, Reference, build, close, random_ids, reference
from torch import Tensor

from peagle.backends.base import TargetModel
from peagle.backends.batch import Batch, Span
from peagle.backends.choose import choose_backend
from peagle.backends.kv_cache import KVCache
from peagle.backends.torch import TorchBackend
from peagle.model.attention import CausalAttend
from peagle.model.target import Target, TargetOutput
from peagle.vllm.capture import last_norm

LENGTH = 20
ONE, OTHER = [3, 1], [0, 4]  # blocks of two requests
Family = tuple[Target, Reference, Reference]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    """A target, and what transformers computes with the same weights for two sequences."""
    model = build(FAMILIES[request.param]())
    first, second = (reference(model, random_ids(n, seed=n)) for n in (LENGTH, LENGTH - 5))
    target = Target(model, None, request.param)  # from here on the model attends through us
    return target, first, second


@pytest.fixture(scope="module", params=["reference", "chosen"])
def model(request: pytest.FixtureRequest, family: Family) -> TargetModel:
    """The family's target as a backend runs it."""
    target = family[0]
    chosen = choose_backend(target.device, target.dtype)
    return (TorchBackend() if request.param == "reference" else chosen).target(target)


def check(model: TargetModel, out: TargetOutput, wanted: Reference, rows: slice) -> None:
    close(out.features, wanted.features[rows])
    close(model.logits(out.hidden), wanted.logits[rows])


def new_cache(target: Target) -> KVCache:
    return KVCache(5, target.kv_shapes, target.dtype, target.device)


def run(model: TargetModel, cache: KVCache, ids: Tensor, start: int) -> TargetOutput:
    """The next tokens of a request."""
    return model.forward(Batch.of([Span(ONE, start, ids.tolist())]), cache, LEFT)


def test_whole_sequence(family: Family) -> None:
    target, wanted, _ = family
    out = target.forward(wanted.ids, torch.arange(LENGTH), CausalAttend(), LEFT)
    close(out.features, wanted.features)
    close(target.logits(out.hidden), wanted.logits)


def test_the_last_norm_makes_the_hidden_states(family: Family) -> None:
    target, wanted, _ = family
    left: list[Tensor] = []
    hook = target.layers[-1].register_forward_hook(lambda _, __, out: left.append(out[0]))
    hidden = target.forward(wanted.ids, torch.arange(LENGTH), CausalAttend()).hidden
    hook.remove()
    close(last_norm(target)(left[0]), hidden)
    with pytest.raises(AssertionError):
        close(left[0], hidden)


@pytest.mark.parametrize("block", [1, 3])
def test_prefill_then_decode(family: Family, model: TargetModel, block: int) -> None:
    target, wanted, _ = family
    cache = new_cache(target)
    starts = [0, *range(WINDOW + 2, LENGTH, block)]  # the context outgrows the window on the way
    for start, end in zip(starts, [*starts[1:], LENGTH], strict=True):
        out = run(model, cache, wanted.ids[start:end], start)
        check(model, out, wanted, slice(start, end))


def test_rejected_tokens_are_overwritten(family: Family, model: TargetModel) -> None:
    target, wanted, _ = family
    cache = new_cache(target)
    run(model, cache, wanted.ids[:6], 0)
    drafted = torch.cat([wanted.ids[6:8], wanted.ids[8:11].flip(0)])  # two right, three wrong
    run(model, cache, drafted, 6)
    check(model, run(model, cache, wanted.ids[8:9], 8), wanted, slice(8, 9))
    check(model, run(model, cache, wanted.ids[9:], 9), wanted, slice(9, None))


def test_packed_requests_do_not_see_each_other(family: Family, model: TargetModel) -> None:
    target, first, second = family
    cache = new_cache(target)
    packed = [  # each step: (request's blocks, reference, start, end), a prompt beside a decode
        [(ONE, first, 0, 9), (OTHER, second, 0, 2)],
        [(OTHER, second, 2, 8), (ONE, first, 9, 10)],
        [(ONE, first, 10, 18), (OTHER, second, 8, 9)],
    ]
    for step in packed:
        spans = [Span(own, start, ref.ids[start:end].tolist()) for own, ref, start, end in step]
        out = model.forward(Batch.of(spans), cache, LEFT)
        at = 0
        for _, ref, start, end in step:
            rows = slice(at, at + end - start)
            at = rows.stop
            part = TargetOutput(out.hidden[rows], out.features[rows])
            check(model, part, ref, slice(start, end))


def test_draft_trees_are_their_branches(family: Family) -> None:
    """A tree of a right branch and wrong ones, behind a prompt: the right one is the sequence."""
    target, wanted, _ = family
    model, cache = TorchBackend().target(target), new_cache(target)
    run(model, cache, wanted.ids[:13], 0)
    right = wanted.ids[13:18].tolist()  # rows 0, 2, 3, 5, 6
    ids = [right[0], 5, right[1], right[2], 6, right[3], right[4]]
    tails = [[], [1], [2], [2, 3], [1, 4], [2, 3, 5], [2, 3, 5, 6]]
    out = model.forward(Batch.of([Span(ONE, 13, ids, tails)]), cache, LEFT)
    rows = [0, 2, 3, 5, 6]
    check(model, TargetOutput(out.hidden[rows], out.features[rows]), wanted, slice(13, 18))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exact_rows_depend_on_nothing_beside_them(family: str, dtype: torch.dtype) -> None:
    """Windows, sinks, caps, and experts that see another number of rows each time."""
    target = Target(build(FAMILIES[family]()).to(dtype), None, family)
    model = choose_backend(target.device, dtype, exact=True).target(target)
    ids = random_ids(40, seed=3).tolist()

    def logits(lengths: list[int]) -> Tensor:
        cache, start, rows = new_cache(target), 0, list[Tensor]()
        for length in lengths:
            batch = Batch.of([Span([2, 0, 4], start, ids[start : start + length])])
            rows.append(model.logits(model.forward(batch, cache, ()).hidden))
            start += length
        return torch.cat(rows)

    singly = logits([1] * 40)
    for lengths in ([40], [3, 9, 8, 1, 7, 12]):
        assert torch.equal(singly, logits(lengths)), lengths
