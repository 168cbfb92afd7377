"""The seam: a method that peagle does not know drafts, trains, and is written and read.

It is P-EAGLE whose logits depend on the token before: a table of bigrams is added to them.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from refusals import refused
from tiny import make_target, own_answers, random_prompts
from torch import Tensor, nn
from tree_reference import accepted_as_the_reference

from peagle.engine.llm import LLM
from peagle.engine.params import SamplingParams
from peagle.heads.load import load_drafter
from peagle.heads.save import save_drafter
from peagle.methods.p_eagle import PEagle
from peagle.methods.registry import METHODS
from peagle.model.config import DrafterConfig
from peagle.model.drafter import Drafter
from peagle.model.target import Target
from peagle.tools.doctor import examine
from peagle.train.config import TrainConfig
from peagle.train.spec import HeadSpec
from peagle.train.trainer import Trainer
from peagle.train.walk import Walk, acceptance
from peagle.train.warm_start import new_drafter

DEPTHS = 4


class BigramDrafter(Drafter):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config)
        self.bigram = nn.Parameter(torch.zeros(config.transformer.vocab_size, len(self.d2t)))


class Bigram(PEagle):
    name = "bigram"
    title = "P-EAGLE with bigrams"
    layers = 1
    conditional = True

    def build(self, config: DrafterConfig) -> Drafter:
        return BigramDrafter(config)

    def logits(self, drafter: Drafter, normed: Tensor, previous_ids: Tensor | None) -> Tensor:
        assert isinstance(drafter, BigramDrafter) and previous_ids is not None
        return drafter.logits(normed) + drafter.bigram[previous_ids]

    def claims(self, raw: Mapping[str, Any]) -> bool:
        return super().claims(raw) and (raw.get("peagle") or {}).get("method") == self.name


@pytest.fixture(scope="module", autouse=True)
def method() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(METHODS, "bigram", Bigram())
        yield


@pytest.fixture(scope="module")
def target() -> Target:
    return make_target(layers=7)


@pytest.fixture(scope="module")
def trained(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder."""
    folder = tmp_path_factory.mktemp("run")
    data = own_answers(target, 24)
    spec = HeadSpec("bigram", depths=DEPTHS, draft_vocab=112)
    drafter = new_drafter(target, [example.ids for example in data], spec)
    walk = Walk(target, data[:4])
    config = TrainConfig(folder, steps=80, lr=3e-3, eval_every=80)
    rows = list[dict[str, Any]]()
    Trainer(config, target, drafter, data, partial(acceptance, walk)).run(rows.append)
    losses = [row["loss"] for row in rows]
    assert sum(losses[-8:]) < sum(losses[:8])
    assert rows[-1]["acceptance_length"] >= 1
    return folder


def test_trained_heads_draft_and_are_verified(target: Target, trained: Path) -> None:
    drafter = load_drafter(trained / "head", target)
    assert isinstance(drafter, BigramDrafter) and drafter.config.method == "bigram"
    assert drafter.bigram.any(), "the loss reaches what `logits` adds"
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    prompts = random_prompts(6)
    alone = LLM(target, lookup=False).generate(prompts, params)
    with_head = LLM(target, drafter, k=DEPTHS).generate(prompts, params)
    assert [a.token_ids for a in with_head] == [a.token_ids for a in alone]
    assert sum(answer.stats.drafted for answer in with_head) > 0


@pytest.mark.parametrize("nodes", [3, 8, 20])
@pytest.mark.parametrize("spread", [0.0, 2.0])
def test_trees_are_the_reference(target: Target, trained: Path, nodes: int, spread: float) -> None:
    """With the table as it was trained, and with one that changes most tokens."""
    drafter = load_drafter(trained / "head", target)
    assert isinstance(drafter, BigramDrafter)
    with torch.no_grad():
        noise = torch.randn(drafter.bigram.shape, generator=torch.Generator().manual_seed(0))
        drafter.bigram.add_(spread * noise)
    assert accepted_as_the_reference(target, drafter, random_prompts(8), nodes, DEPTHS) > 0


def test_what_is_written_is_read_and_healthy(target: Target, trained: Path, tmp_path: Path) -> None:
    drafter = load_drafter(trained / "head", target)
    save_drafter(drafter, tmp_path / "again", dtype=None)
    read = load_drafter(tmp_path / "again", target)
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(read.state_dict()[name], tensor), name
    checks = examine(tmp_path / "again", target)
    assert [check for check in checks if check.state == "wrong"] == []
    [logits] = [check for check in checks if check.name == "logits"]
    assert f"{DEPTHS} of {DEPTHS} argmaxes agree" in logits.found


def test_an_unknown_method_is_named(target: Target, trained: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(METHODS, "bigram")
        with refused("head") as error:
            load_drafter(trained / "head", target)
        assert "bigram" in error.value.why
