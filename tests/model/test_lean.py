"""Our layers in the place of transformers': which ones, with which weights, and what they compute
(test_families.py compares that with transformers for Llama and Qwen3)."""

import pytest
import torch
from families import FAMILIES, PLAIN, build, random_ids
from transformers import LlamaConfig, Qwen3Config

from peagle.model.attend import CausalAttend
from peagle.model.lean import LeanLayer
from peagle.model.packed import StandIn
from peagle.model.quantized import KINDS, quantize_layers
from peagle.model.target import Target

OURS = {"llama": [0, 1, 2, 3], "qwen3": [0, 1]}  # Qwen3's last two layers have a window


@pytest.mark.parametrize("family", FAMILIES)
def test_only_layers_of_a_kind_we_have_are_replaced(family: str) -> None:
    target = Target(build(FAMILIES[family]()), None, family).lean()
    ours = [i for i, layer in enumerate(target.layers) if isinstance(layer, LeanLayer)]
    assert ours == OURS.get(family, [])


def test_a_layer_with_weights_we_have_no_place_for_stays() -> None:
    """vLLM's Qwen3, and so ours, has no bias behind its attention."""
    target = Target(build(Qwen3Config(**PLAIN, head_dim=8, attention_bias=True)), None, "tiny")
    assert not any(isinstance(layer, LeanLayer) for layer in target.lean().layers)


@pytest.mark.parametrize("kind", KINDS)
def test_quantised_layers_are_replaced_with_the_weights_they_have(kind: str) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 192}
    target = Target(build(LlamaConfig(**PLAIN | sizes)), None, "tiny")
    quantize_layers(target, kind)
    held = {name: m for name, m in target.model.named_modules() if isinstance(m, StandIn)}
    ids, at = random_ids(5), torch.arange(5)
    before = target.forward(ids, at, CausalAttend()).hidden
    target.lean()
    assert all(isinstance(layer, LeanLayer) for layer in target.layers)
    assert len(held) == 4 * 7
    assert all(target.model.get_submodule(name) is module for name, module in held.items())
    after = target.forward(ids, at, CausalAttend()).hidden
    torch.testing.assert_close(after, before, atol=1e-4, rtol=1e-4)


def test_weights_keep_their_names_and_their_memory() -> None:
    target = Target(build(LlamaConfig(**PLAIN)), None, "tiny")
    before, fingerprint = dict(target.model.named_parameters()), target.weights_hash()
    target.lean()
    after = dict(target.model.named_parameters())
    assert after.keys() == before.keys() and target.weights_hash() == fingerprint
    assert all(after[name] is before[name] for name in before)
    assert not any(parameter.requires_grad for parameter in after.values())


def test_rows_of_a_tile_do_not_depend_on_rows_beside_them() -> None:
    target = Target(build(LlamaConfig(**PLAIN)).bfloat16(), None, "tiny").lean().pack()
    target.exact(True)
    target.tap((1, 2, 3))
    ids, at = random_ids(3), torch.arange(3)
    whole = target.forward(ids, at, CausalAttend())
    first = target.forward(ids[:1], at[:1], CausalAttend())
    assert whole.features is not None and first.features is not None
    assert whole.hidden.shape[0] == 3, "the rows that fill the tile are not given away"
    assert torch.equal(whole.hidden[:1], first.hidden)
    assert torch.equal(whole.features[:1], first.features)
