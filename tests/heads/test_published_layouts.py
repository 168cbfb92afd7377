"""Layouts of heads that others publish, of random tensors: loaded, exported, examined, served.

Keys and names of tensors are those of the sources; sizes are small.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from tiny import make_drafter, make_target
from torch import Tensor

from peagle.heads.format import read_keys
from peagle.heads.load import load_drafter
from peagle.heads.save import save_drafter
from peagle.model.attention import CausalAttend
from peagle.model.drafter import Drafter
from peagle.model.target import Target
from peagle.tools.doctor import examine
from peagle.vllm.flags import RUNNER
from peagle.vllm.head import needs_of, unreadable

Raw = dict[str, Any]
FILE = Path(__file__).with_name("published_layouts.yaml")
# Names of stored tensors; one without a name is not stored.
NAMES: dict[str, Callable[[str], str | None]] = {
    "ours": lambda name: name,
    "midlayer": lambda name: name.replace("layers.0.", "midlayer."),
    "without table": lambda name: None if name in ("t2d", "embed_tokens.weight") else name,
    "midlayer without table": lambda name: (
        None if "embed_tokens" in name else name.replace("layers.0.", "midlayer.")
    ),
    "wrapped": lambda name: name if name in ("d2t", "t2d") else f"model.{name}",
}


class Layout(NamedTuple):
    """A way in which others store a head."""

    method: str
    keys: Raw  # over the sizes and `ptd_token_id` of the head
    since: str
    names: str = "ours"
    all_drafted: bool = False
    layers: Sequence[int] = (2, 4, 5)  # the default of a target of eight layers
    speculators: bool = False
    warned: Sequence[str] = ()


LAYOUTS = yaml.safe_load(FILE.read_text())["layouts"]


@pytest.fixture(scope="module")
def target() -> Target:
    return make_target(layers=8)


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> Layout:
    return Layout(**LAYOUTS[request.param])


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
    config = replace(made.config, transformer=kind, embedding="full")
    config = replace(config, feature_layers=tuple(layout.layers))
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
    stored = {NAMES[layout.names](name): tensor for name, tensor in tensors.items()}
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
        assert loaded.config.feature_layers == tuple(layout.layers)

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
