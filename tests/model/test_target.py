"""Models that a Target refuses, and the fingerprints a head is checked against."""

from collections.abc import Callable

import pytest
import torch
from families import FAMILIES, PLAIN, SIZES, build
from refusals import refused
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    BambaConfig,
    BloomConfig,
    FalconH1Config,
    JambaConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    OPTConfig,
    PretrainedConfig,
    Qwen3NextConfig,
    RecurrentGemmaConfig,
)
from transformers.utils import ModelOutput

from peagle.model.attention import AttentionSpec, CausalAttend, HeadShape
from peagle.model.fingerprints import config_hash, weights_hash
from peagle.model.target import Target
from peagle.vllm.capture import last_norm

MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8}
SMALL = {"vocab_size": 67, "hidden_size": 32, "num_hidden_layers": 2}
REFUSED: dict[str, tuple[Callable[[], PretrainedConfig], str]] = {
    "mamba": (lambda: MambaConfig(**SMALL), "linear_attention"),
    "jamba": (lambda: JambaConfig(**PLAIN, num_experts=2), "linear_attention"),
    "bamba": (lambda: BambaConfig(**PLAIN, **MAMBA), "linear_attention"),
    "falcon_h1": (lambda: FalconH1Config(**PLAIN), "hybrid"),
    "qwen3_next": (lambda: Qwen3NextConfig(**PLAIN, num_experts=2), "linear_attention"),
    "recurrent_gemma": (lambda: RecurrentGemmaConfig(**SIZES, pad_token_id=0), "linear_attention"),
    # hides its masks, positional bias or keyword arguments from the attention interface
    "bloom": (lambda: BloomConfig(**SMALL, n_head=4), "its own attention"),
    "opt": (
        lambda: OPTConfig(**SMALL, ffn_dim=32, num_attention_heads=4, word_embed_proj_dim=32),
        "attention interface",
    ),
}


def tiny_llama(seed: int = 0, **sizes: int) -> Target:
    return Target(build(LlamaConfig(**PLAIN | sizes), seed), None, "tiny")


@pytest.mark.parametrize("model_type", REFUSED)
def test_models_with_other_token_mixers_are_refused_by_name(model_type: str) -> None:
    config, why = REFUSED[model_type]
    model = AutoModelForCausalLM.from_config(config(), attn_implementation="eager")
    with refused("target") as error:
        Target(model, None, "mine")
    assert model_type in error.value.why and why in error.value.why


def test_unknown_kinds_of_layer_are_refused() -> None:
    """Not only those known to be foreign: a mask of a new kind would be ignored in silence."""
    config = LlamaConfig(**PLAIN)
    config.layer_types = ["full_attention", "chunked_attention"] * 2
    with refused("target") as error:
        Target(LlamaForCausalLM(config), None, "mine")
    assert "chunked_attention" in error.value.why


def test_a_layer_with_an_attention_of_its_own_is_found_by_running_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = build(LlamaConfig(**PLAIN))
    attention = model.model.layers[2].self_attn
    monkeypatch.setattr(attention, "forward", lambda hidden_states, **_: (hidden_states, None))
    with refused("target") as error:
        Target(model, None, "mine")
    assert "layers [2] " in error.value.why


def test_inference_only() -> None:
    target = tiny_llama()
    assert not any(p.requires_grad for p in target.model.parameters())
    ids = torch.arange(3)
    assert not target.forward(ids, ids, CausalAttend()).hidden.requires_grad


def test_features_are_what_enters_the_tapped_layers() -> None:
    target, ids = tiny_llama(), torch.arange(5)
    assert target.forward(ids, ids, CausalAttend()).features.shape == (5, 0)
    both = target.forward(ids, ids, CausalAttend(), (0, 2)).features
    one = target.forward(ids, ids, CausalAttend(), (2,)).features
    assert both.shape == (5, 64)
    torch.testing.assert_close(both[:, :32], target.embedding[ids])  # entering layer 0
    torch.testing.assert_close(one, both[:, 32:])
    assert target.forward(ids, ids, CausalAttend()).features.shape == (5, 0), "nothing is kept"


def test_a_copy_shares_its_weights_and_nothing_else() -> None:
    """Modules of the copy may be replaced: the target computes what it did, tapped or not."""
    target, ids = tiny_llama(), torch.arange(5)
    wanted = target.forward(ids, ids, CausalAttend(), (1, 2))
    copy = target.copy()
    parameters = dict(copy.model.named_parameters())
    assert len(parameters) > 30
    for name, parameter in target.model.named_parameters():
        assert parameters[name] is parameter, name
    for target_or_copy in (copy, target):
        found = target_or_copy.forward(ids, ids, CausalAttend(), (1, 2))
        assert torch.equal(found.features, wanted.features)
        assert torch.equal(found.hidden, wanted.hidden)
        copy.layers[3].mlp = torch.nn.Identity()
        assert not torch.equal(copy.forward(ids, ids, CausalAttend()).hidden, wanted.hidden)


def test_an_exact_target_leaves_the_first_one_as_it_is() -> None:
    target = Target(build(FAMILIES["qwen3_moe"]()), None, "moe")
    before = target.config._experts_implementation
    exact = target.exact()
    assert exact.config._experts_implementation == "batched_mm"
    assert target.config._experts_implementation == before
    ids = torch.arange(5)
    one, two = (t.forward(ids, ids, CausalAttend()).hidden for t in (target, exact))
    torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_kv_shapes_are_those_of_the_keys_and_values(family: str) -> None:
    target, found = Target(build(FAMILIES[family]()), None, family), dict[int, HeadShape]()
    causal, ids = CausalAttend(), torch.arange(3)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        assert k.shape[:2] == v.shape[:2] == (3, k.shape[1])
        found[layer] = HeadShape(k.shape[1], k.shape[2], v.shape[2])
        return causal(layer, q, k, v, spec)

    target.forward(ids, ids, attend)
    assert target.kv_shapes == [found[layer] for layer in range(len(target.layers))]


@pytest.mark.parametrize("layers", [(1, 5), (-1, 2)])
def test_taps_outside_the_target(layers: tuple[int, ...]) -> None:
    with refused("feature_layers"):
        tiny_llama().check_layers(layers)


def test_fingerprints_tell_targets_apart() -> None:
    same, again, other = tiny_llama(), tiny_llama(), tiny_llama(seed=1)
    assert weights_hash(same) == weights_hash(again) != weights_hash(other)
    assert config_hash(same) == config_hash(other)
    for key, value in {"num_hidden_layers": 3, "hidden_size": 40, "vocab_size": 70}.items():
        assert config_hash(tiny_llama(**{key: value})) != config_hash(same), key


def test_weights_hash_sees_a_changed_norm_and_not_the_dtype() -> None:
    model = build(LlamaConfig(**PLAIN))
    before = weights_hash(Target(model.bfloat16(), None, "tiny"))
    assert weights_hash(Target(model.float(), None, "tiny")) == before
    with torch.no_grad():
        model.model.layers[-1].input_layernorm.weight[0] += 1
    assert weights_hash(Target(model, None, "tiny")) != before


def test_a_decoder_that_does_more_after_its_norm_has_no_last_norm() -> None:
    target = tiny_llama()
    assert last_norm(target) is target.decoder.norm

    def scaled(_: object, __: object, out: ModelOutput) -> None:
        out.last_hidden_state = out.last_hidden_state * 2

    target.decoder.register_forward_hook(scaled)
    with refused("target"):
        last_norm(target)
