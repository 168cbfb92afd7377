"""The target over packed documents, and its logits of some tokens."""

from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, PLAIN, build
from tiny import make_target
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PhiConfig

from peagle.backends.cpu.backend import CpuBackend
from peagle.backends.cpu.packed import keep_packed
from peagle.data.example import Example
from peagle.model import attention as attention_module
from peagle.model.attention import AttentionSpec
from peagle.model.target import Target
from peagle.model.tensors import missing_rows
from peagle.train import passes
from peagle.train.batches import PackedDocuments
from peagle.train.capture import in_process
from peagle.train.config import TrainConfig
from peagle.train.passes import DocumentsAttend, fast_products, logits_of, run_target
from peagle.train.spec import HeadSpec
from peagle.train.trainer import Trainer
from peagle.train.warm_start import new_drafter

TOKENS = 26


def packed(documents: Tensor) -> PackedDocuments:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(5, 128, (TOKENS,), generator=generator)
    return PackedDocuments(ids, documents >= 0, documents)


@torch.no_grad()
def test_rows_of_the_target_recur(target: Target) -> None:
    """Also with packed documents, each attended to alone."""
    own, attended = target.copy(), list[int]()
    rows = list[int]()
    own.layers[0].register_forward_pre_hook(lambda _, inputs: rows.append(inputs[0].shape[1]))
    kernel = attention_module.attention

    def attention(q: Tensor, *others: Any) -> Tensor:
        attended.append(len(q))
        return kernel(q, *others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_module, "attention", attention)
        documents = (torch.arange(TOKENS) >= 10).long()
        out = run_target(own, packed(documents), (0, 1))
    assert len(attended) == 2 * len(own.layers) and len(rows) == 1
    assert all(missing_rows(count) == 0 for count in rows + attended)
    assert len(out.hidden) == len(out.features) == TOKENS


def test_documents_do_not_see_each_other(target: Target) -> None:
    """Packed documents get the features and states each gets alone."""
    documents = (torch.arange(TOKENS) >= 10).long()
    sequence = packed(documents)
    assert sequence.positions.tolist() == [*range(10), *range(TOKENS - 10)]
    both = run_target(target, sequence, (0, 1, 3))
    for part in (slice(0, 10), slice(10, TOKENS)):
        alone = run_target(target, PackedDocuments(*(x[part] for x in sequence)), (0, 1, 3))
        torch.testing.assert_close(both.features[part], alone.features)
        torch.testing.assert_close(both.hidden[part], alone.hidden)


def test_documents_in_one_call_equal_documents_one_by_one() -> None:
    """A GPU attends to all documents together; here the same call runs on the CPU."""
    documents = torch.tensor([0] * 5 + [3] * 11 + [4])
    attend = DocumentsAttend(PackedDocuments(documents, documents > 0, documents))
    generator = torch.Generator().manual_seed(0)
    rows = len(documents) + missing_rows(len(documents))
    q, k, v = (torch.randn(rows, heads, 8, generator=generator) for heads in (6, 2, 2))
    together = attend.together(q, k, v, 0.3)[: len(documents)]
    one_by_one = attend(0, q, k, v, AttentionSpec(0.3))[: len(documents)]
    torch.testing.assert_close(together, one_by_one)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_some_tokens_are_columns_of_all(family: str) -> None:
    """Caps and scales of the model's own head included; the target stays as it is."""
    target = Target(build(FAMILIES[family]()), None, family)
    output = target.model.get_output_embeddings()
    ids = torch.tensor([5, 3, 66, 20])
    hidden = torch.randn(6, 32)
    all_of_them = target.logits(hidden)
    some = logits_of(target, ids)(hidden)
    torch.testing.assert_close(some, all_of_them[:, ids])
    assert some.std() > 0.1 and not some.requires_grad
    assert target.model.get_output_embeddings() is output
    assert torch.equal(target.logits(hidden), all_of_them)


def test_logits_of_some_tokens_include_the_bias() -> None:
    model = build(PhiConfig(**PLAIN))
    target, ids = Target(model, None, "phi"), torch.tensor([7, 2])
    assert model.get_output_embeddings().bias is not None
    hidden = torch.randn(3, 32)
    torch.testing.assert_close(logits_of(target, ids)(hidden), target.logits(hidden)[:, ids])


def test_logits_of_some_tokens_of_a_target_that_is_fast_on_a_cpu() -> None:
    """An engine that owns its target replaces the output layer of its head."""
    target, ids, hidden = make_target(), torch.tensor([5, 3, 66]), torch.randn(6, 32)
    before = target.logits(hidden)[:, ids]
    CpuBackend(lambda _: None, keep_packed).target(target, own=True)
    torch.testing.assert_close(logits_of(target, ids)(hidden), before)


class Noted(TorchFunctionMode):
    """Notes the dtypes that layers multiply in."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes = list[torch.dtype]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is passes.LINEAR:
            self.dtypes.append(args[0].dtype)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_layers_of_bf16_where_a_processor_multiplies_float32_faster(
    monkeypatch: pytest.MonkeyPatch, *, bias: bool, fast: bool
) -> None:
    monkeypatch.setattr(passes, "multiplies_bf16", lambda device: fast)
    layer = nn.Linear(64, 32, bias=bias, dtype=torch.bfloat16).requires_grad_(False)
    x = torch.randn(8, 64, dtype=torch.bfloat16)
    with Noted() as noted, fast_products(x.device):
        made = layer(x)
        precise = layer.double()(x.double())
    assert noted.dtypes == [torch.bfloat16 if fast else torch.float32, torch.float64]
    assert made.dtype == torch.bfloat16
    torch.testing.assert_close(made.double(), precise, rtol=2**-8, atol=1e-6)


def test_what_runs_a_target_multiplies_fast(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, data: list[Example]
) -> None:
    monkeypatch.setattr(passes, "multiplies_bf16", lambda device: False)
    made = make_target()
    target = Target(made.model.bfloat16(), made.tokenizer, "tiny, bf16")
    spec = HeadSpec("p-eagle", feature_layers=(1, 2), layers=1, depths=3, draft_vocab=100)
    drafter = new_drafter(target, [example.ids for example in data], spec)
    trainer = Trainer(TrainConfig(tmp_path, steps=1), target, drafter, data)
    run = in_process(target, (1, 2))
    for work in (trainer.run, lambda: list(run([data[0].ids]))):
        with Noted() as noted:
            work()
        assert torch.float32 in noted.dtypes and torch.bfloat16 not in noted.dtypes
