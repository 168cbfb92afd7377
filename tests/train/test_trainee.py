"""One training forward means what the engine drafts; labels and gradients are as defined."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tiny import METHODS, features_of, make_drafter, make_target, random_prompts
from torch import Tensor, nn

from peagle.backends.batch import BLOCK, slots_of
from peagle.backends.kv_cache import FeatureCache, KVCache
from peagle.backends.torch import TorchBackend
from peagle.engine.draft import Proposer
from peagle.engine.tree import grow
from peagle.methods.base import Elements, NewSlots
from peagle.methods.registry import method_of
from peagle.model.attention import CausalAttend
from peagle.model.drafter import Drafter
from peagle.model.target import Target
from peagle.model.tensors import missing_rows
from peagle.train import trainee as trainee_module
from peagle.train.batches import PackedDocuments
from peagle.train.elements import Segment, sample_elements
from peagle.train.passes import multiplies_bf16, run_drafter, run_target
from peagle.train.trainee import Trainee

TOKENS, DEPTHS = 26, 5


@pytest.fixture(scope="module")
def target() -> Target:
    return make_target(seed=2, spread=0.3)


def make_sequence(prompt: int = 8) -> PackedDocuments:
    """Tokens of the draft vocabulary only, as far as they are supervised."""
    ids = torch.tensor([i for p in random_prompts(20, seed=3) for i in p][:TOKENS])
    ids = torch.where((torch.arange(TOKENS) >= prompt) & (ids < 78), ids // 2 + 80, ids)
    return PackedDocuments(ids, torch.arange(TOKENS) >= prompt, torch.zeros_like(ids))


def one_pass(sequence: PackedDocuments, ratio: float = 1.0) -> Segment:
    generator = torch.Generator().manual_seed(0)
    return sample_elements(*sequence[1:], DEPTHS, ratio, generator)


def trained_logits(drafter: Drafter, target: Target, ratio: float) -> dict[tuple[int, int], Tensor]:
    sequence = make_sequence()
    elements = one_pass(sequence, ratio).elements
    features = features_of(target, drafter, sequence.ids.tolist())
    logits = drafter.logits(run_drafter(drafter, sequence, features, elements))
    pairs = zip(elements.anchor.tolist(), elements.depth.tolist(), strict=True)
    return dict(zip(pairs, logits, strict=True))


def drafting_logits(drafter: Drafter, target: Target, anchor: int) -> list[Tensor]:
    """Logits of DEPTHS slots after the verified prefix x[0 … anchor + 1], computed alone."""
    ids = make_sequence().ids
    real = drafter.project(features_of(target, drafter, ids[: anchor + 1].tolist()))
    if drafter.config.method == "p-eagle":
        masks = torch.full((DEPTHS - 1,), drafter.config.mask_token_id)
        slots = torch.cat([real, drafter.placeholders(DEPTHS - 1)])
        tokens = torch.cat([ids[1 : anchor + 2], masks])
        out = drafter(tokens, slots, torch.arange(len(tokens)), CausalAttend())
        return list(drafter.logits(out.normed[anchor:]))
    rows = []  # teacher-forced: each slot is fed the true token
    for depth in range(min(DEPTHS, len(ids) - anchor - 1)):
        tokens = ids[1 : anchor + 2 + depth]
        out = drafter(tokens, real, torch.arange(len(tokens)), CausalAttend())
        rows.append(drafter.logits(out.normed[-1]))
        real = torch.cat([real, out.recurrent[-1:]])
    return rows


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("ratio", [1.0, 0.6])
@pytest.mark.parametrize("flags", [{}, {"norm_output": True, "norm_before_fc": True}])
@torch.no_grad()
def test_equals_drafting(target: Target, method: str, ratio: float, flags: dict[str, bool]) -> None:
    drafter = make_drafter(target, method, **flags)
    trained = trained_logits(drafter, target, ratio)
    drafted = {a: drafting_logits(drafter, target, a) for a in range(TOKENS - 1)}
    assert {d for _, d in trained} == set(range(DEPTHS))
    for (anchor, depth), logits in trained.items():
        torch.testing.assert_close(logits, drafted[anchor][depth], rtol=0, atol=1e-4)
    spread = torch.stack(list(trained.values())).std(0).min()
    assert spread > 0.05, "elements differ, so the comparison says something"


@pytest.mark.parametrize("method", METHODS)
@torch.no_grad()
def test_rows_recur(target: Target, method: str) -> None:
    """Kernels are made, and kept, for every number of rows: whole tiles only, whatever is drawn."""
    drafter, sequence, rows = make_drafter(target, method), make_sequence(), list[int]()
    drafter.norm.register_forward_pre_hook(lambda _, inputs: rows.append(len(inputs[0])))
    elements = one_pass(sequence, 0.7).elements
    features = features_of(target, drafter, sequence.ids.tolist())
    normed = run_drafter(drafter, sequence, features, elements)
    assert rows and all(missing_rows(count) == 0 for count in rows)
    assert len(normed) == len(elements.anchor)


@torch.no_grad()
def test_training_equals_the_engine(target: Target) -> None:
    """The engine's own drafting, through its cache, chooses the training forward's tokens."""
    drafter, sequence = make_drafter(target, "p-eagle"), make_sequence()
    trained = trained_logits(drafter, target, 1.0)
    features = features_of(target, drafter, sequence.ids.tolist())
    blocks = range(-(-(TOKENS + DEPTHS) // BLOCK))
    cache = KVCache(len(blocks), drafter.kv_shapes, target.dtype, target.device)
    kept = FeatureCache(len(blocks), drafter.config.feature_width, target.dtype, target.device)
    kept.write(torch.tensor(slots_of(blocks, 0, TOKENS)), features)
    proposer = Proposer(method_of(drafter.config), TorchBackend().drafter(drafter), cache, kept)
    for anchor in range(7, TOKENS - DEPTHS - 2):
        start = 0 if anchor == 7 else anchor
        ids = sequence.ids[start + 1 : anchor + 2].tolist()
        slots = [NewSlots(blocks, start, ids, DEPTHS)]
        (offer,) = proposer.propose(slots, [None], None, lambda _, prob: prob)
        best = [int(trained[anchor, d].argmax()) for d in range(DEPTHS)]
        assert grow(offer, DEPTHS).tokens == drafter.target_ids[best].tolist()


def packed(documents: Tensor, supervised: Tensor) -> PackedDocuments:
    return PackedDocuments(make_sequence().ids, supervised, documents)


def trained_pairs(sequence: PackedDocuments, elements: Elements) -> list[tuple[int, int]]:
    """Supervised elements (anchor, depth) by the definition."""
    return [
        (a, d)
        for a, d in zip(*(x.tolist() for x in elements), strict=True)
        if a + d + 2 < TOKENS
        and sequence.supervised[a + d + 2]
        and sequence.documents[a] == sequence.documents[a + d + 2]
    ]


@pytest.mark.parametrize(("rows", "decay"), [(7, 1.0), (1024, 1.0), (7, 0.5)])
@pytest.mark.parametrize("split", [TOKENS, 11])
def test_loss_and_counts_by_loops(  # noqa: PLR0913, PLR0917
    target: Target, monkeypatch: pytest.MonkeyPatch, rows: int, split: int, decay: float
) -> None:
    """Each supervised element is compared with what transformers alone says at a + d + 1, also
    where documents are packed, and is correct where it predicts the document's token at a + d + 2;
    chunks change nothing."""
    monkeypatch.setattr(trainee_module, "LOSS_ROWS", rows)
    drafter = make_drafter(target, "p-eagle", draft_vocab=50)
    sequence = packed((torch.arange(TOKENS) >= split).long(), torch.arange(TOKENS) >= 8)
    segment = one_pass(sequence, 0.7)
    elements = segment.elements
    output = run_target(target, sequence, drafter.config.feature_layers)
    normed = torch.randn(len(elements.anchor), 32, generator=torch.Generator().manual_seed(1))
    known = {token: row for row, token in enumerate(drafter.target_ids.tolist())}
    for a, d in trained_pairs(sequence, elements):  # some are correct
        if a % 2 and (row := known.get(int(sequence.ids[a + d + 2]))) is not None:
            at = ((elements.anchor == a) & (elements.depth == d)).nonzero()[0]
            normed[at] = 30 * drafter.lm_head.weight[row].detach()
    trainee = Trainee(drafter, target, decay)
    result = trainee.compare(sequence, output.hidden, segment, normed)
    reference = target.copy().model
    reference.set_attn_implementation("eager")
    parts = [sequence.ids[:split], sequence.ids[split:]]
    full = torch.cat([_plain(reference, part) for part in parts if len(part)])
    total, correct, supervised = 0.0, [0] * DEPTHS, [0] * DEPTHS
    states = dict(zip(zip(*(x.tolist() for x in elements), strict=True), normed, strict=True))
    for a, d in trained_pairs(sequence, elements):
        logits, wanted = drafter.logits(states[a, d]).detach(), full[a + d + 1]
        p = wanted[drafter.target_ids].softmax(-1)
        total += decay**d * float((p * (p.log() - logits.log_softmax(-1))).sum().detach())
        supervised[d] += 1
        correct[d] += int(drafter.target_ids[logits.argmax()] == sequence.ids[a + d + 2])
    assert (result.correct.tolist(), result.supervised.tolist()) == (correct, supervised)
    assert sum(correct) > 0
    assert float(result.loss.detach()) == pytest.approx(total, rel=1e-4)


def _plain(model: nn.Module, ids: Tensor) -> Tensor:
    """Logits by transformers alone."""
    return model(ids[None]).logits[0]


def test_unsupervised_elements_give_no_gradient(target: Target) -> None:
    drafter, sequence = make_drafter(target, "p-eagle"), make_sequence(prompt=15)
    segment = one_pass(sequence)
    hidden = torch.randn(TOKENS, 32)
    normed = torch.randn(len(segment.trained), 32).requires_grad_()
    trainee = Trainee(drafter, target)
    trainee.compare(sequence, hidden, segment, normed).loss.backward()
    touched = normed.grad.abs().sum(-1) > 0
    elements = segment.elements
    pairs = zip(*(x.tolist() for x in elements), strict=True)
    expected = set(trained_pairs(sequence, elements))
    assert touched.tolist() == [pair in expected for pair in pairs]
    assert touched.any() and not touched.all()


@pytest.mark.usefixtures("unrounded")
@pytest.mark.parametrize("method", METHODS)
def test_the_whole_head_is_trained(target: Target, method: str) -> None:
    """Every parameter gets a gradient, and the target none."""
    drafter, sequence = make_drafter(target, method), make_sequence()
    trainee = Trainee(drafter, target)
    output = run_target(target, sequence, drafter.config.feature_layers)
    trainee(sequence, output, one_pass(sequence, 0.7)).loss.backward()
    for name, parameter in drafter.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name
    assert not any(p.requires_grad or p.grad is not None for p in target.model.parameters())


@pytest.mark.parametrize("fast", [True, False])
def test_bf16_where_a_processor_multiplies_it(
    target: Target, monkeypatch: pytest.MonkeyPatch, *, fast: bool
) -> None:
    """Without instructions for it a CPU takes 20 times as long in bf16 as in float32."""
    monkeypatch.setattr(trainee_module, "multiplies_bf16", lambda device: fast)
    drafter = make_drafter(target, "p-eagle")
    sequence = make_sequence()
    products = set[torch.dtype]()
    drafter.fc.register_forward_hook(lambda module, given, made: products.add(made.dtype))
    output = run_target(target, sequence, drafter.config.feature_layers)
    Trainee(drafter, target)(sequence, output, one_pass(sequence))
    assert products == {torch.bfloat16 if fast else torch.float32}


def test_processors_that_multiply_bf16() -> None:
    assert multiplies_bf16(torch.device("cuda"))
    flags = Path("/proc/cpuinfo")
    if flags.is_file() and "avx512_bf16" in flags.read_text().split():
        assert multiplies_bf16(torch.device("cpu"))


@pytest.mark.parametrize("method", METHODS)
def test_the_targets_embedding_is_not_sent_between_processes(target: Target, method: str) -> None:
    drafter = make_drafter(target, method)
    assert "drafter.shared_embedding" in dict(Trainee(drafter, target).named_buffers())
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        copied = nn.parallel.DistributedDataParallel(Trainee(drafter, target))
    finally:
        dist.destroy_process_group()
    assert set(copied.named_module_buffers) == {"drafter.d2t", "drafter.rotary.inv_freq"}
