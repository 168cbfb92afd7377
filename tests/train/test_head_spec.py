"""A head can be made for every family, those whose layers differ in heads too, and run."""

import pytest
import torch
from families import FAMILIES, PLAIN, build
from tiny import METHODS, features_of, make_tokenizer
from transformers import LlamaConfig, Phi3Config

from peagle.model.attention import CausalAttend
from peagle.model.target import Target
from peagle.train.spec import HeadSpec, drafter_config
from peagle.train.warm_start import new_drafter


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family: str, method: str) -> None:
    spec = HeadSpec(method, layers=2, depths=4, draft_vocab=16, feature_layers=(1, 2, 3))
    target = Target(build(FAMILIES[family]()), make_tokenizer(), family)
    drafter = new_drafter(target, [[5, 6, 7] * 9, list(range(8, 40))], spec)
    assert drafter.config.transformer.hidden_size == target.embedding.shape[1]
    with torch.no_grad():
        features = drafter.project(features_of(target, drafter, [5, 6, 7]))
        ids, attend = torch.tensor([6, 7, 8]), CausalAttend()
        out = drafter(ids, features, torch.arange(3), attend)
        assert drafter.logits(out.normed).isfinite().all()


@pytest.mark.parametrize("activation", ["gelu", "relu", "relu2"])
def test_the_activation_is_one_that_vllm_has(activation: str) -> None:
    model = build(LlamaConfig(**PLAIN, hidden_act=activation))
    spec = HeadSpec(feature_layers=(1, 2, 3))
    config = drafter_config(Target(model, make_tokenizer(), "llama"), spec, mask_token_id=3)
    assert config.transformer.hidden_act == "silu"


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ["default", "longrope"])
def test_a_target_that_turns_a_part_of_each_key(kind: str, method: str) -> None:
    """Its head turns all of it, here and in vLLM, which would obey the target's factor."""
    rope = {"rope_type": kind, "rope_theta": 300.0, "partial_rotary_factor": 0.75}
    if kind == "longrope":
        factors = {"short_factor": [1.0] * 6, "long_factor": [4.0] * 6}
        rope |= factors | {"original_max_position_embeddings": 16}
    sizes = {**PLAIN, "hidden_size": 64, "max_position_embeddings": 64}
    target = Target(build(Phi3Config(**sizes, rope_parameters=rope)), make_tokenizer(), "phi3")
    spec = HeadSpec(method, layers=2, draft_vocab=16, feature_layers=(1, 2, 3))
    drafter = new_drafter(target, [[5, 6, 7] * 9], spec)
    wanted = {"rope_type": "default", "rope_theta": 300.0}
    assert drafter.config.transformer.rope_parameters == wanted
    with torch.no_grad():
        features = drafter.project(features_of(target, drafter, [5, 6, 7]))
        out = drafter(torch.tensor([6, 7, 8]), features, torch.arange(3), CausalAttend())
    assert out.normed.isfinite().all()
