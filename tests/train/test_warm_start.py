"""A new drafter carries the target's own weights where shapes allow."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from families import FAMILIES, MIXED, PLAIN, SIZES, SPECIAL, build
from refusals import refused
from tiny import METHODS, make_target, make_tokenizer
from transformers import (
    ArceeConfig,
    Gemma3TextConfig,
    GemmaConfig,
    Olmo2Config,
    Qwen3Config,
    VaultGemmaConfig,
)

from peagle.model.drafter import Drafter
from peagle.model.fingerprints import config_hash, template_hash, weights_hash
from peagle.model.target import Target
from peagle.train.spec import HeadSpec
from peagle.train.warm_start import new_drafter

ANSWERS = [[90] * 9, [50] * 7 + [100] * 8, [20] * 3]
GEMMA = {**SIZES, **SPECIAL, "head_dim": 8}
MORE = {  # families besides those of families.py
    "gemma": lambda: GemmaConfig(**GEMMA),
    "gemma3": lambda: Gemma3TextConfig(**GEMMA, layer_types=list(MIXED)),
    "vaultgemma": lambda: VaultGemmaConfig(**GEMMA, layer_types=list(MIXED)),
    "olmo2": lambda: Olmo2Config(**PLAIN),
}


def make(target: Target, method: str, **changes: object) -> Drafter:
    sizes = {"layers": 2, "depths": 6, "draft_vocab": 4, "feature_layers": (0, 2, 3)}
    spec = HeadSpec(method, **(sizes | changes))  # type: ignore[arg-type]
    return new_drafter(target, ANSWERS, spec)


@pytest.mark.parametrize("method", METHODS)
def test_config(target: Target, method: str) -> None:
    config = make(target, method).config
    assert (config.method, config.depths, config.draft_vocab_size) == (method, 6, 4)
    assert config.feature_layers == (0, 2, 3)
    assert config.embedding == ("mask-row" if method == "p-eagle" else "shared")
    assert config.mask_token_id == (3 if method == "p-eagle" else None), "a reserved token"
    assert config.provenance.target == target.name
    assert config.provenance.weights_hash == weights_hash(target)
    assert config.provenance.config_hash == config_hash(target)
    assert config.provenance.template_hash == template_hash(target)
    assert config.provenance.feature_layers == [0, 2, 3]


@pytest.mark.parametrize("method", METHODS)
def test_copied_weights(target: Target, method: str) -> None:
    drafter = make(target, method)
    assert drafter.target_ids.tolist() == [20, 50, 90, 100], "the most frequent, ascending"
    head = target.model.get_output_embeddings().weight
    assert torch.equal(drafter.lm_head.weight, head[[20, 50, 90, 100]])
    assert torch.equal(drafter.norm.weight, target.decoder.norm.weight)
    features = torch.randn(5, 3 * 32)
    if drafter.fc_norm is not None:  # a norm that keeps the usual size of a feature
        last = drafter.fc_norm[2]
        features[:, 64:] *= last.weight.mean() / features[:, 64:].square().mean(-1, True).sqrt()
    torch.testing.assert_close(drafter.project(features), features[:, 64:])
    if method == "p-eagle":
        mean = target.embedding[[20, 50, 90, 100]].mean(0)
        torch.testing.assert_close(drafter.mask_embedding.data, mean)
        torch.testing.assert_close(drafter.embed(torch.tensor([3]))[0], mean)
    assert torch.equal(drafter.embed(torch.tensor([7])), target.embedding[[7]])


def wide() -> Target:
    """A Qwen3 whose queries are twice as wide as its states, as those of Qwen3-0.6B."""
    config = Qwen3Config(**PLAIN | {"vocab_size": 128}, head_dim=16)
    return Target(build(config), make_tokenizer(), "wide")


@pytest.mark.parametrize("kind", [make_target, wide])
def test_copied_layers(kind: Callable[[], Target]) -> None:
    target = kind()
    drafter = make(target, "p-eagle")
    for mine, theirs in zip(drafter.layers[1:], target.layers[-1:], strict=True):
        source = dict(theirs.named_parameters())
        for name, parameter in mine.named_parameters():
            assert torch.equal(parameter, source[name]), name
    first, source = drafter.layers[0], target.layers[-2]
    for name in ("q_proj", "k_proj", "v_proj"):
        mine, theirs = (getattr(x.self_attn, name).weight for x in (first, source))
        assert torch.equal(mine[:, 32:], theirs), "the feature half"
        assert 0 < mine[:, :32].std() < 0.003, "the embedding half starts small"
    assert torch.equal(first.self_attn.o_proj.weight, source.self_attn.o_proj.weight)
    assert torch.equal(first.mlp.up_proj.weight, source.mlp.up_proj.weight)
    assert torch.equal(first.hidden_norm.weight, source.input_layernorm.weight)


def test_a_feed_forward_without_a_gate_is_not_copied() -> None:
    """Half of a head's would compute nothing of it."""
    target = Target(build(ArceeConfig(**PLAIN)), make_tokenizer(), "arcee")
    spec = HeadSpec(layers=2, depths=4, draft_vocab=16, feature_layers=(1, 2, 3))
    drafter = new_drafter(target, [[5, 6, 7] * 9], spec)
    for mine, theirs in zip(drafter.layers, target.layers[-2:], strict=True):
        assert torch.equal(mine.self_attn.o_proj.weight, theirs.self_attn.o_proj.weight)
        for name in ("up_proj", "down_proj"):
            found, source = (getattr(layer.mlp, name).weight for layer in (mine, theirs))
            assert found.shape == source.shape and not torch.equal(found, source)


@pytest.mark.parametrize("family", [*(name for name in FAMILIES if name != "gpt2"), *MORE])
def test_norms_compute_what_the_targets_do(family: str) -> None:
    """Those of Gemma to Gemma 3 multiply by 1 + w. From Gemma 2 on, `post_attention_layernorm` is
    not the one before the feed-forward; OLMo 2 has none there."""
    target = Target(build((FAMILIES | MORE)[family]()), make_tokenizer(), family)
    spec = HeadSpec(layers=2, depths=4, draft_vocab=16, feature_layers=(1, 2, 3))
    drafter = new_drafter(target, [[5, 6, 7] * 9], spec)
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(drafter.norm(x), target.decoder.norm(x))
    plain = torch.nn.RMSNorm(32, eps=target.config.rms_norm_eps)
    for mine, theirs in zip(drafter.layers, target.layers[-2:], strict=True):
        before = getattr(theirs, "input_layernorm", plain)
        before_mlp = getattr(theirs, "post_attention_layernorm", plain)
        if hasattr(theirs, "pre_feedforward_layernorm") or family == "olmo2":
            before_mlp = getattr(theirs, "pre_feedforward_layernorm", plain)
        torch.testing.assert_close(mine.post_attention_layernorm(x), before_mlp(x))
        torch.testing.assert_close(mine.input_layernorm(x), before(x))
    first = getattr(target.layers[-2], "input_layernorm", plain)
    torch.testing.assert_close(drafter.layers[0].hidden_norm(x), first(x))


def test_more_layers_than_the_target_has(target: Target) -> None:
    drafter = make(target, "eagle3", layers=6)
    assert len(drafter.layers) == 6
    assert all(torch.isfinite(p).all() for p in drafter.parameters())


def test_draft_vocabulary_is_at_most_the_targets(target: Target) -> None:
    drafter = make(target, "p-eagle", draft_vocab=10_000)
    assert drafter.target_ids.tolist() == list(range(128))


def test_shallow_targets_need_named_layers(target: Target) -> None:
    with refused("feature_layers"):
        make(target, "p-eagle", feature_layers=None)


@pytest.mark.parametrize("method", METHODS)
def test_a_table_of_its_own(target: Target, method: str) -> None:
    drafter = make(target, method, embedding="full")
    assert drafter.config.embedding == "full"
    table, other = drafter.embed_tokens.weight, [i for i in range(128) if i != 3]
    assert table.requires_grad and torch.equal(table[other], target.embedding[other])
    expected = target.embedding[[20, 50, 90, 100]].mean(0)
    torch.testing.assert_close(table[3], expected if method == "p-eagle" else target.embedding[3])


def test_a_cold_start_copies_nothing_but_the_embedding(target: Target) -> None:
    drafter = make(target, "p-eagle", warm_start=False)
    assert torch.equal(drafter.embed(torch.tensor([7])), target.embedding[[7]])
    head = target.model.get_output_embeddings().weight
    assert not torch.equal(drafter.lm_head.weight, head[[20, 50, 90, 100]])
    assert 0.01 < drafter.fc.weight.std() < 0.03


@pytest.mark.parametrize(
    ("field", "value"),
    [("layers", 0), ("depths", 0), ("draft_vocab", 0), ("embedding", "x"), ("method", "medusa")],
)
def test_bad_spec(field: str, value: Any) -> None:
    with refused(field):
        HeadSpec(**{field: value})
