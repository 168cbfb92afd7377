"""The drafter against its forward by hand, and its plain layers against transformers' own."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from families import VOCAB, close
from tiny_heads import FLAGS, MASK_ID, ByHand, head_config, make_head, tiny_target
from torch import Tensor
from transformers import LlamaConfig, PretrainedConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from peagle.model.attention import CausalAttend
from peagle.model.config import DrafterConfig
from peagle.model.drafter import Drafter
from peagle.model.layer_config import LayerConfig
from peagle.model.layers import DrafterOutput

SLOTS, K = 6, 4
ROPES: dict[str, dict[str, Any]] = {
    "theta": {"rope_type": "default", "rope_theta": 500.0},
    "yarn": {
        "rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "llama3": {
        "rope_type": "llama3", "rope_theta": 100.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
    },
}  # fmt: skip
VARIANTS: dict[str, DrafterConfig] = {
    "plain": head_config(),
    **{flag: head_config(**{flag: True}) for flag in FLAGS},
    "attention_bias": head_config(sizes={"attention_bias": True}),
    "mlp_bias": head_config(sizes={"mlp_bias": True}),
    "head_dim": head_config(sizes={"head_dim": 12}),
    "theta": head_config(sizes={"rope_parameters": ROPES["theta"]}),
    "narrow target": head_config(target_hidden_size=20),
    "qwen3": head_config(kind="qwen3"),
    "qwen3 bias": head_config(kind="qwen3", sizes={"attention_bias": True}),
}


def draw(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def slot_inputs(config: DrafterConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, raw features and positions of SLOTS real slots."""
    ids = torch.arange(SLOTS) * 7 + 3
    return ids, draw(SLOTS, 3 * config.target_hidden_size), torch.arange(SLOTS)


def run(drafter: Drafter) -> DrafterOutput:
    ids, features, positions = slot_inputs(drafter.config)
    with torch.no_grad():
        return drafter(ids, drafter.project(features), positions, CausalAttend())


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_equals_its_forward_by_hand(name: str) -> None:
    drafter = make_head(VARIANTS[name])
    ids, features, positions = slot_inputs(drafter.config)
    hand = ByHand(drafter)
    embedding = drafter.state_dict()["embed_tokens.weight"][ids]
    normed, before = hand.forward(embedding, hand.project(features), positions)
    out = run(drafter)
    close(out.normed, normed)
    close(out.recurrent, normed if name == "norm_output" else before)


@pytest.mark.parametrize("flag", FLAGS)
def test_every_flag_changes_the_output(flag: str) -> None:
    plain, flagged = make_head(VARIANTS["plain"]), make_head(VARIANTS[flag])
    flagged.load_state_dict(plain.state_dict(), strict=False)  # the norms of a flag stay drawn
    field = "recurrent" if flag == "norm_output" else "normed"
    difference = getattr(run(plain), field) - getattr(run(flagged), field)
    assert difference.abs().max() > 0.1


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("variant", ["plain", "norm_before_fc", "fc_norm"])
def test_placeholders_give_k_predictions_in_one_forward(variant: str, kind: str) -> None:
    config = replace(VARIANTS[variant], transformer=head_config(kind=kind).transformer)
    drafter = make_head(config)
    ids, features, _ = slot_inputs(config)
    ids = torch.cat([ids, torch.full((K - 1,), MASK_ID)])
    positions = torch.arange(SLOTS + K - 1)
    with torch.no_grad():
        inputs = torch.cat([drafter.project(features), drafter.placeholders(K - 1)])
        found = drafter(ids, inputs, positions, CausalAttend()).normed
    hand = ByHand(drafter)
    raw = torch.cat([features, hand.w["mask_hidden"].expand(K - 1, -1)])
    wanted, _ = hand.forward(hand.w["embed_tokens.weight"][ids], hand.project(raw), positions)
    close(found, wanted)
    assert (found[-1] - found[-2]).abs().max() > 1e-3  # the depths are told apart by position


def theirs(sizes: LayerConfig, x: Tensor, weights: dict[str, Tensor]) -> Tensor:
    """A decoder layer of transformers on x (T, D)."""
    kind: Any = LlamaDecoderLayer
    made: type[PretrainedConfig] = LlamaConfig
    if sizes.model_type == "qwen3":
        kind, made = Qwen3DecoderLayer, Qwen3Config
    config = made(**sizes.to_json())
    config._attn_implementation = "eager"
    layer = kind(config, layer_idx=0).eval()
    layer.load_state_dict(weights)
    mask = torch.full((len(x), len(x)), float("-inf")).triu(1)[None, None]
    positions = torch.arange(len(x))[None]
    rotary = LlamaRotaryEmbedding(config)(x, positions)
    out = layer(x[None], attention_mask=mask, position_ids=positions, position_embeddings=rotary)
    return out[0]


@pytest.mark.parametrize("rope", ["none", *ROPES])
@pytest.mark.parametrize("kind", ["llama", "llama with biases", "qwen3"])
@torch.no_grad()
def test_plain_layers_are_those_of_transformers(kind: str, rope: str) -> None:
    biases = {"attention_bias": True, "mlp_bias": True} if "biases" in kind else {}
    scaling = {"rope_parameters": ROPES[rope]} if rope in ROPES else {}
    drafter = make_head(head_config(kind=kind.removesuffix(" with biases"), sizes=biases | scaling))
    seen: list[Tensor] = []
    layer = drafter.layers[1]
    layer.register_forward_hook(lambda _, inputs, output: seen.extend([inputs[0], output]))
    run(drafter)
    close(seen[1], theirs(drafter.config.transformer, seen[0], layer.state_dict()))


@pytest.mark.parametrize("rope", ["default", *ROPES])
def test_angles_do_not_depend_on_the_dtype_of_the_weights(rope: str) -> None:
    sizes = {"rope_parameters": ROPES[rope]} if rope in ROPES else {}
    head = make_head(head_config(sizes=sizes))
    at = torch.tensor([[1, 100, 1000]])
    right = head.rotary(torch.zeros(1), at)
    served = copy.deepcopy(head).to(torch.bfloat16)
    assert served.norm.weight.dtype == torch.bfloat16
    for ours, wanted in zip(served.rotary(torch.zeros(1), at), right, strict=True):
        assert torch.equal(ours, wanted)


def test_logit_scale_scales_the_logits() -> None:
    plain, scaled = make_head(head_config()), make_head(head_config(logit_scale=0.25))
    close(plain.logits(draw(4, 32)) * 0.25, scaled.logits(draw(4, 32)))


def test_mask_row_replaces_one_row_of_the_targets_table() -> None:
    target = tiny_target()
    drafter = make_head(head_config(embedding="mask-row"), target=target)
    rows = drafter.embed(torch.tensor([5, MASK_ID, 6]))
    close(rows[[0, 2]], target.embedding[[5, 6]])
    close(rows[1], drafter.mask_embedding)
    rows.sum().backward()  # only the row of the mask token is trained
    assert drafter.mask_embedding.grad is not None and target.embedding.grad is None


def test_shared_embedding_is_neither_trained_nor_stored() -> None:
    target = tiny_target()
    drafter = make_head(head_config("eagle3", "shared"), target=target)
    close(drafter.embed(torch.arange(VOCAB)), target.embedding)
    assert not any("embed" in name for name in drafter.state_dict())


def test_an_own_table_is_kept_beside_a_target() -> None:
    drafter = make_head(head_config(), target=tiny_target())
    close(drafter.embed(torch.arange(VOCAB)), drafter.embed_tokens.weight)


def test_one_id_feature_and_position_a_slot() -> None:
    drafter = make_head(head_config())
    with pytest.raises(AssertionError, match="not one of each"):
        drafter(torch.arange(3), draw(4, 32), torch.arange(4), CausalAttend())


def test_vllm_has_no_output_bias_in_qwen3_layers() -> None:
    names = make_head(VARIANTS["qwen3 bias"]).state_dict()
    assert "layers.0.self_attn.q_proj.bias" in names
    assert "layers.0.self_attn.o_proj.bias" not in names
