"""One training forward means what the engine drafts; labels and gradients are as defined."""

import copy

import pytest
import torch
from tiny import METHODS, features_of, make_drafter, make_target, random_prompts
from torch import Tensor

from peagle.engine.draft import NewSlots, propose
from peagle.engine.kv_cache import KVCache
from peagle.model.attend import CausalAttend
from peagle.model.config import Method
from peagle.model.drafter import Drafter
from peagle.model.target import Target
from peagle.train import step as step_module
from peagle.train.cod import Elements, sample_elements
from peagle.train.step import Labels, Sequence, compare, run_drafter, run_target

TOKENS, DEPTHS = 26, 5


@pytest.fixture(scope="module")
def target() -> Target:
    return make_target(seed=2, spread=0.3)


def make_sequence(prompt: int = 8) -> Sequence:
    ids = torch.tensor([i for p in random_prompts(20, seed=3) for i in p][:TOKENS])
    return Sequence(ids, torch.arange(TOKENS) >= prompt, torch.zeros_like(ids))


def all_elements(sequence: Sequence, ratio: float = 1.0) -> Elements:
    generator = torch.Generator().manual_seed(0)
    return sample_elements(*sequence[1:], DEPTHS, ratio, 0.1, generator)


def training_logits(
    drafter: Drafter, target: Target, ratio: float
) -> dict[tuple[int, int], Tensor]:
    sequence = make_sequence()
    elements = all_elements(sequence, ratio)
    features = features_of(target, drafter, sequence.ids.tolist())
    logits = drafter.logits(run_drafter(drafter, sequence, features, elements))
    pairs = zip(elements.anchor.tolist(), elements.depth.tolist(), strict=True)
    return dict(zip(pairs, logits, strict=True))


def drafting_logits(drafter: Drafter, target: Target, anchor: int) -> list[Tensor]:
    """Logits of DEPTHS slots behind the verified prefix x[0 … anchor + 1], computed alone."""
    ids = make_sequence().ids
    real = drafter.project(features_of(target, drafter, ids[: anchor + 1].tolist()))
    if drafter.config.method == "p-eagle":
        masks = torch.full((DEPTHS - 1,), drafter.config.mask_token_id)
        slots = torch.cat([real, drafter.placeholder().expand(DEPTHS - 1, -1)])
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
def test_training_equals_drafting(
    target: Target, method: Method, ratio: float, flags: dict[str, bool]
) -> None:
    drafter = make_drafter(target, method, **flags)
    trained = training_logits(drafter, target, ratio)
    drafted = {a: drafting_logits(drafter, target, a) for a in range(TOKENS - 1)}
    assert {d for _, d in trained} == set(range(DEPTHS))
    for (anchor, depth), logits in trained.items():
        torch.testing.assert_close(logits, drafted[anchor][depth], rtol=0, atol=1e-4)
    spread = torch.stack(list(trained.values())).std(0).min()
    assert spread > 0.05, "elements differ, so the comparison says something"


@torch.no_grad()
def test_training_equals_the_engine(target: Target) -> None:
    """The engine's own drafting, through its cache, chooses the training forward's tokens."""
    drafter, sequence = make_drafter(target, "p-eagle"), make_sequence()
    trained = training_logits(drafter, target, 1.0)
    features = features_of(target, drafter, sequence.ids.tolist())
    cache = KVCache(1, TOKENS + DEPTHS)
    for anchor in range(7, TOKENS - DEPTHS - 2):
        start = 0 if anchor == 7 else anchor
        ids = sequence.ids[start + 1 : anchor + 2].tolist()
        slots = NewSlots(0, start, ids, features[start : anchor + 1])
        (draft,) = propose(drafter, cache, [slots], DEPTHS)
        best = [int(trained[anchor, d].argmax()) for d in range(DEPTHS)]
        assert draft == drafter.target_ids[best].tolist()


def test_labels_are_the_targets_logits(target: Target) -> None:
    drafter, sequence = make_drafter(target, "p-eagle", draft_vocab=50), make_sequence()
    target.tap(drafter.config.feature_layers)
    features, labels = run_target(target, drafter, sequence)
    torch.testing.assert_close(features, features_of(target, drafter, sequence.ids.tolist()))
    target.tap(())
    reference = copy.deepcopy(target.model)
    reference.set_attn_implementation("eager")  # transformers alone
    full = reference(sequence.ids[None]).logits[0]
    for position in range(TOKENS):
        predicts_answer = position + 1 < TOKENS and bool(sequence.supervised[position + 1])
        row = int(labels.row[position])
        assert (row >= 0) == predicts_answer
        if predicts_answer:
            torch.testing.assert_close(labels.logits[row], full[position, drafter.target_ids])
            assert labels.best[row] == full[position].argmax()
    assert len(labels.logits) == len(labels.best) == int((labels.row >= 0).sum())


def test_labels_stay_in_their_document(target: Target) -> None:
    """No label where the next token opens another document."""
    drafter, sequence = make_drafter(target, "p-eagle"), make_sequence(prompt=0)
    target.tap(drafter.config.feature_layers)
    documents = (torch.arange(TOKENS) >= 10).long()
    _, labels = run_target(target, drafter, sequence._replace(documents=documents))
    assert (labels.row < 0).nonzero()[:, 0].tolist() == [9, TOKENS - 1]


def fake_labels(sequence: Sequence, vocab: int, draft_vocab: int) -> Labels:
    g = torch.Generator().manual_seed(8)
    wanted = sequence.supervised[1:].nonzero()[:, 0]
    row = torch.full((TOKENS,), -1)
    row[wanted] = torch.arange(len(wanted))
    best = torch.randint(0, vocab, (len(wanted),), generator=g)
    return Labels(row, torch.randn(len(wanted), draft_vocab, generator=g), best)


@pytest.mark.parametrize("rows", [7, 1024])
def test_loss_and_counts_by_loops(
    target: Target, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    """Each supervised element is compared with the label at a + d + 1; chunks change nothing."""
    monkeypatch.setattr(step_module, "LOSS_ROWS", rows)
    drafter, sequence = make_drafter(target, "p-eagle"), make_sequence()
    elements, labels = all_elements(sequence, 0.7), fake_labels(sequence, 128, 96)
    normed = torch.randn(len(elements.anchor), 32, generator=torch.Generator().manual_seed(1))
    result = compare(drafter, elements, normed, labels, "kl")
    total, count = 0.0, 0
    correct, supervised = [0] * DEPTHS, [0] * DEPTHS
    for a, d, state in zip(*(x.tolist() for x in elements), normed, strict=True):
        if a + d + 2 < TOKENS and sequence.supervised[a + d + 2]:
            row = labels.row[a + d + 1]
            logits = drafter.logits(state)
            p = labels.logits[row].softmax(-1)
            total += float((p * (p.log() - logits.log_softmax(-1))).sum().detach())
            count += 1
            supervised[d] += 1
            correct[d] += int(drafter.target_ids[logits.argmax()] == labels.best[row])
    assert result.count == count
    assert (result.correct.tolist(), result.supervised.tolist()) == (correct, supervised)
    assert float(result.loss.detach()) == pytest.approx(total, rel=1e-5)


def test_unsupervised_elements_give_no_gradient(target: Target) -> None:
    drafter, sequence = make_drafter(target, "p-eagle"), make_sequence(prompt=15)
    elements, labels = all_elements(sequence), fake_labels(sequence, 128, 96)
    normed = torch.randn(len(elements.anchor), 32).requires_grad_()
    compare(drafter, elements, normed, labels, "kl").loss.backward()
    touched = normed.grad.abs().sum(-1) > 0
    predicted = elements.anchor + elements.depth + 2
    inside = predicted < TOKENS
    assert torch.equal(touched, inside & sequence.supervised[predicted.clamp(max=TOKENS - 1)])
    assert touched.any() and not touched.all()


def test_nothing_supervised_gives_zero(target: Target) -> None:
    drafter, sequence = make_drafter(target, "p-eagle"), make_sequence(prompt=TOKENS)
    target.tap(drafter.config.feature_layers)
    features, labels = run_target(target, drafter, sequence)
    elements = all_elements(sequence)
    normed = run_drafter(drafter, sequence, features, elements)
    result = compare(drafter, elements, normed, labels, "kl")
    result.loss.backward()
    assert (result.loss.item(), result.count) == (0.0, 0)


@pytest.mark.parametrize("method", METHODS)
def test_the_whole_head_is_trained(target: Target, method: Method) -> None:
    """Every parameter gets a gradient, and the target none."""
    drafter, sequence = make_drafter(target, method), make_sequence()
    target.tap(drafter.config.feature_layers)
    features, labels = run_target(target, drafter, sequence)
    elements = all_elements(sequence, 0.7)
    normed = run_drafter(drafter, sequence, features, elements)
    compare(drafter, elements, normed, labels, "kl").loss.backward()
    for name, parameter in drafter.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name
    assert not any(p.requires_grad or p.grad is not None for p in target.model.parameters())
