"""Layouts of heads that others publish, of random tensors: loaded, exported, examined, served.

Keys and names of tensors are those of the sources; sizes are small.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import make_drafter, make_target
from torch import Tensor

from peagle.heads.format import read_keys
from peagle.heads.load import load_drafter
from peagle.heads.save import save_drafter
from peagle.methods.keys import LAYER_IDS
from peagle.model.attention import CausalAttend
from peagle.model.drafter import Drafter
from peagle.model.target import Target
from peagle.tools.doctor import examine
from peagle.vllm.flags import RUNNER
from peagle.vllm.head import needs_of, unreadable

Raw = dict[str, Any]
LLAMA3 = {
    "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "rope_type": "llama3",
    "original_max_position_embeddings": 64,
}  # fmt: skip
OF_TRANSFORMERS_4 = {
    "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
    "initializer_range": 0.02, "mlp_bias": False, "pretraining_tp": 1, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "transformers_version": "4.57.1", "use_cache": True,
}  # fmt: skip
LLAMA = {**OF_TRANSFORMERS_4, "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}


def midlayer(name: str) -> str | None:
    return name.replace("layers.0.", "midlayer.")


def without_table(name: str) -> str | None:
    return None if "embed_tokens" in name else midlayer(name)


def wrapped(name: str) -> str | None:
    return name if name in ("d2t", "t2d") else f"model.{name}"


class Layout(NamedTuple):
    """A way in which others store a head."""

    method: str
    keys: Raw  # over the sizes and `ptd_token_id` of the head
    since: str  # the first vLLM that runs it
    rename: Callable[[str], str | None] = lambda name: name  # None: not stored
    all_drafted: bool = False
    layers: tuple[int, ...] = (2, 4, 5)  # the default of a target of eight layers
    speculators: bool = False
    warned: tuple[str, ...] = ()  # checks that may find something


LAYOUTS = {
    # aws-neuron/nkipy, examples/models/gpt_oss/peagle (README.md, tensor_preparation.py)
    "amazon/GPT-OSS-20B-P-EAGLE": Layout(
        "p-eagle",
        LLAMA | {"rope_scaling": LLAMA3, "rope_theta": 500000.0},
        "0.16.0",
        midlayer,
        True,
    ),
    # sgl-project/SpecForge, configs/gpt-oss-120B-eagle3.json
    "SpecForge, nested ids": Layout(
        "eagle3",
        LLAMA | {"eagle_config": {LAYER_IDS: [1, 3, 6]}, "pad_token_id": 0},
        "0.10.2",
        without_table,
        layers=(1, 3, 6),
        warned=("feature layers",),
    ),
    # sgl-project/SpecForge, configs/qwen3-30B-A3B-eagle3.1.json
    "SpecForge, EAGLE-3.1": Layout(
        "eagle3",
        LLAMA
        | {
            "fc_norm": True,
            "norm_output": True,
            "max_window_layers": 48,
            "sliding_window": None,
            "use_sliding_window": False,
            "rope_scaling": None,
            "rope_theta": 1000000.0,
        },  # fmt: skip
        "0.22.0",
        without_table,
    ),
    # NVIDIA/Model-Optimizer, modelopt/torch/export/plugins/hf_spec_configs.py
    "NVIDIA": Layout(
        "eagle3",
        LLAMA
        | {
            "eagle_config": {
                LAYER_IDS: [],
                "use_aux_hidden_state": True,
                "next_layer_regular": True,
                "use_input_layernorm_in_first_layer": True,
                "use_last_layernorm": True,
                "use_mtp_layernorm": False,
                "parallel_draft_step": 1,
                "parallel_draft_heads_num_layers": 1,
            },
        },  # fmt: skip
        "0.10.2",
        lambda name: None if name in ("t2d", "embed_tokens.weight") else name,
    ),
    # NVIDIA-NeMo/Automodel, components/speculative (draft_llama.py, serve_vllm.py)
    "NeMo Automodel": Layout(
        "p-eagle",
        LLAMA | {"ptd_token_id": None, "mask_token_id": 3, "parallel_drafting": True},
        "0.28.0",
        wrapped,
    ),
    # vllm-project/speculators 0.1 (nm-testing/EAGLE3-LLaMA3.1-Instruct-8B-converted)
    "speculators, EAGLE-3": Layout(
        "eagle3",
        {
            "sizes": {"model_type": "llama", "rope_scaling": None, "rope_theta": 10000.0},
            "target_hidden_size": None,
            "norm_before_residual": False,
            LAYER_IDS: None,
            "has_no_defaults_at_init": False,
            "torch_dtype": "float32",
        },  # fmt: skip
        "0.10.2",
        speculators=True,
    ),
    # the same without `norm_before_residual`, which vLLM then takes as true
    "speculators, defaults left out": Layout("eagle3", {"sizes": {}}, "0.10.2", speculators=True),
    # vllm-project/speculators, models/peagle/config.py, with a Qwen3Config of transformers 5
    "speculators, P-EAGLE": Layout(
        "p-eagle",
        {
            "sizes": {
                "model_type": "qwen3",
                "layer_types": ["full_attention"] * 2,
                "max_window_layers": 28,
                "sliding_window": None,
                "use_sliding_window": False,
            },
            "fc_norm": False,
            "norm_before_fc": True,
            "norm_output": False,
            LAYER_IDS: None,
            "embed_requires_grad": True,
            "dtype": "bfloat16",
        },  # fmt: skip
        "0.24.0",
        speculators=True,
    ),
}


@pytest.fixture(scope="module")
def target() -> Target:
    return make_target(layers=8)


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> Layout:
    return LAYOUTS[request.param]


def config_of(head: Drafter, layout: Layout) -> Raw:
    """config.json of a head in a layout."""
    given = dict(layout.keys)
    sizes = {
        key: value
        for key, value in head.config.transformer.to_json().items()
        if key not in ("model_type", "rope_parameters", "attention_bias", "mlp_bias")
    }
    raw = {"draft_vocab_size": head.config.draft_vocab_size}
    if not layout.speculators:
        mask = {"ptd_token_id": 3} if layout.method == "p-eagle" else {}
        return {k: v for k, v in {**sizes, **raw, **mask, **given}.items() if v is not None}
    kind = {"p-eagle": "peagle", "eagle3": "eagle3"}[layout.method]
    proposal = {"proposal_type": "greedy", "speculative_tokens": 5}
    raw |= {
        "speculators_model_type": kind,
        "transformer_layer_config": {**sizes, **given.pop("sizes")},
        "speculators_config": {
            "algorithm": kind,
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": "owner/target", "architectures": ["LlamaForCausalLM"]},
        },
    }
    return raw | given | ({"mask_token_id": 3} if layout.method == "p-eagle" else {})


def written(layout: Layout, target: Target, folder: Path) -> Drafter:
    """Write a random head in a layout; return it."""
    flags = {flag: True for flag in ("fc_norm", "norm_output", "norm_before_fc")
             if layout.keys.get(flag)}  # fmt: skip
    if layout.speculators and layout.method == "eagle3":
        flags["norm_before_residual"] = layout.keys.get("norm_before_residual", True)
    vocab = len(target.embedding) if layout.all_drafted else None
    made = make_drafter(target, layout.method, draft_vocab=vocab, **flags)
    sizes = layout.keys.get("sizes", layout.keys)
    kind = replace(made.config.transformer, model_type=sizes.get("model_type", "llama"))
    if theta := sizes.get("rope_theta"):
        rope = {"rope_theta": theta, "rope_type": "default", **(sizes.get("rope_scaling") or {})}
        kind = replace(kind, rope_parameters=rope)
    config = replace(made.config, transformer=kind, feature_layers=layout.layers, embedding="full")
    head = Drafter(config)
    torch.manual_seed(2)
    for parameter in head.parameters():
        parameter.data.copy_(torch.randn_like(parameter) * 0.2 + (parameter.ndim == 1))
    head.d2t.copy_(made.d2t)
    table = target.embedding.clone()
    if layout.method == "p-eagle":
        table[3] = torch.randn(table.shape[1])
    head.embed_tokens.weight.data.copy_(table)
    save_drafter(head, folder, "vllm", dtype=None)
    tensors = load_file(folder / "model.safetensors")
    if layout.all_drafted:  # theirs stores what maps each token to itself
        tensors |= {"d2t": head.d2t, "t2d": torch.ones(vocab or 0, dtype=torch.bool)}
    stored = {layout.rename(name): tensor for name, tensor in tensors.items()}
    save_file({k: v for k, v in stored.items() if k}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config_of(head, layout)))
    return head.eval()


def logits(head: Drafter) -> Tensor:
    """Logits of random features and tokens."""
    features = torch.randn(6, head.config.feature_width, generator=torch.Generator().manual_seed(0))
    ids, places = torch.tensor([5, 3, 9, 3, 40, 7]), torch.arange(6)
    with torch.no_grad():
        return head.logits(head(ids, head.project(features), places, CausalAttend()).normed)


def test_a_layout_of_others(layout: Layout, target: Target, tmp_path: Path) -> None:
    head = written(layout, target, tmp_path / "theirs")
    loaded = load_drafter(tmp_path / "theirs", target)
    assert torch.equal(logits(loaded), logits(head))
    assert torch.equal(loaded.target_ids, head.target_ids)
    if not layout.warned:
        assert loaded.config.feature_layers == layout.layers

    needs = needs_of(read_keys(tmp_path / "theirs"))
    assert unreadable(read_keys(tmp_path / "theirs")) is None
    assert (needs.method, needs.since.version) == (layout.method, layout.since)
    assert bool(needs.environ.get(RUNNER)) == (layout.method == "p-eagle" or bool(layout.warned))
    assert (needs.below is None) != layout.all_drafted

    wrong = {check.name for check in examine(tmp_path / "theirs", target) if check.state == "wrong"}
    assert wrong <= set(layout.warned)

    for dialect in ("native", "vllm", "speculators"):
        if dialect == "speculators" and layout.keys.get("fc_norm"):
            continue
        made = tmp_path / dialect
        save_drafter(loaded, made, dialect, dtype=None)  # type: ignore[arg-type]
        assert torch.equal(logits(load_drafter(made, target)), logits(head))
        states = {check.name: check.state for check in examine(made, target)}
        assert "wrong" not in states.values()
        keys = read_keys(made)
        assert unreadable(keys) is None and needs_of(keys).below is None
