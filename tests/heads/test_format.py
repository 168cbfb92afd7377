"""Heads on disk: what is written is what is read, in every dialect, and as vLLM expects it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from families import PLAIN, TAPS, VOCAB
from json_files import change_json, read_json
from refusals import refused
from safetensors.torch import load_file, save_file
from tiny_heads import (
    DRAFT_IDS,
    FLAGS,
    HIDDEN,
    KINDS,
    MASK_ID,
    head_config,
    make_head,
    provenance_of,
    tiny_target,
)
from torch import Tensor
from transformers import LlamaConfig, Qwen3Config

from peagle.heads.format import read_config, read_tensors
from peagle.heads.load import load_drafter
from peagle.heads.save import save_drafter
from peagle.methods.base import Dialect
from peagle.model.attention import CausalAttend
from peagle.model.config import DrafterConfig, Embedding
from peagle.model.drafter import Drafter

DIALECTS: tuple[Dialect, ...] = ("native", "vllm", "speculators")
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
YARN = {
    "rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16,
}  # fmt: skip


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny_target()


def facts(config: DrafterConfig) -> dict[str, Any]:
    """Everything a configuration says, comparable."""
    names = (f for f in DrafterConfig.__slots__ if f != "transformer")
    return {name: getattr(config, name) for name in names} | config.transformer.to_json()


def raw_config(folder: Path) -> Any:
    return read_json(folder / "config.json")


def change_config(folder: Path, **changes: Any) -> None:
    change_json(folder / "config.json", **changes)


def same_tensors(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(("method", "embedding"), KINDS)
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_round_trip(
    kind: str, method: str, embedding: Embedding, dialect: Dialect, target: Any, tmp_path: Path
) -> None:
    provenance = provenance_of(target)
    config = head_config(method, embedding, kind=kind, depths=5, provenance=provenance)
    head = make_head(config, target=target)
    save_drafter(head, tmp_path / "head", dialect, dtype=None)
    loaded = load_drafter(tmp_path / "head", target)
    if dialect == "native" or embedding != "mask-row":
        same_tensors(loaded.state_dict(), head.state_dict())
        assert facts(loaded.config) == facts(config)
    else:  # the table is materialised
        assert loaded.config.embedding == "full"
        assert facts(loaded.config) | {"embedding": "mask-row"} == facts(config)
    ids = torch.tensor([3, MASK_ID, 9])
    assert torch.equal(loaded.embed(ids), head.embed(ids))


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(
    "changes",
    [
        *({flag: True} for flag in FLAGS),
        {"logit_scale": 0.5},
        {"target_hidden_size": 20},
        {"sizes": {"attention_bias": True, "mlp_bias": True, "head_dim": 12}},
        {"sizes": {"rope_parameters": YARN}},
        {"sizes": {"sliding_window": 9}},
    ],
    ids=str,
)
def test_every_flag_survives(changes: dict[str, Any], dialect: Dialect, tmp_path: Path) -> None:
    if dialect == "speculators" and "fc_norm" in changes:
        head = make_head(head_config("eagle3", fc_norm=True))
    else:
        head = make_head(head_config(**changes))
    save_drafter(head, tmp_path / "head", dialect, dtype=None)
    assert facts(read_config(tmp_path / "head")) == facts(head.config)
    found = read_tensors(tmp_path / "head")
    assert torch.equal(found.pop("mask_hidden", torch.zeros(0)).flatten(), mask_hidden(head))
    wanted = {name: t for name, t in head.state_dict().items() if name != "mask_hidden"}
    same_tensors({name: t for name, t in found.items() if name != "t2d"}, wanted)


def mask_hidden(head: Drafter) -> Tensor:
    return head.state_dict().get("mask_hidden", torch.zeros(0))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_bf16_is_the_default(dialect: Dialect, target: Any, tmp_path: Path) -> None:
    head = make_head(head_config(), target=target)
    save_drafter(head, tmp_path / "head", dialect)
    raw = raw_config(tmp_path / "head")
    assert raw.get("transformer_layer_config", raw)["dtype"] == "bfloat16"
    stored = read_tensors(tmp_path / "head")
    assert stored["fc.weight"].dtype == torch.bfloat16 and stored["d2t"].dtype == torch.int64
    loaded = load_drafter(tmp_path / "head", target).state_dict()
    rounded = {
        name: t.bfloat16().float() if t.is_floating_point() else t
        for name, t in head.state_dict().items()
    }
    same_tensors(loaded, rounded)


def test_the_head_takes_the_targets_dtype(tmp_path: Path) -> None:
    target = tiny_target()
    save_drafter(make_head(head_config()), tmp_path / "head", dtype=None)
    target.dtype = torch.bfloat16
    loaded = load_drafter(tmp_path / "head", target)
    assert loaded.fc.weight.dtype == torch.bfloat16 and loaded.d2t.dtype == torch.int64


def test_native_files_stay_under_16_mb_and_an_export_is_one_file(tmp_path: Path) -> None:
    wide = {"hidden_size": 256, "intermediate_size": 12_000, "num_hidden_layers": 1}
    head = Drafter(head_config("eagle3", sizes=wide))
    for dialect in DIALECTS:
        save_drafter(head, tmp_path / dialect, dialect)
        sizes = [file.stat().st_size for file in (tmp_path / dialect).glob("*.safetensors")]
        assert sum(sizes) > 16_000_000 and (max(sizes) < 16_000_000) == (dialect == "native")
        assert len(sizes) == 1 or dialect == "native"
    assert read_tensors(tmp_path / "native").keys() == {*head.state_dict(), "t2d"}


@pytest.mark.parametrize("method", ["p-eagle", "eagle3"])
def test_what_vllm_reads(method: str, target: Any, tmp_path: Path) -> None:
    save_drafter(make_head(head_config(method)), tmp_path / "head", "vllm")
    raw = raw_config(tmp_path / "head")
    assert raw["architectures"] == ["LlamaForCausalLMEagle3"] and raw["model_type"] == "llama"
    assert raw[LAYER_IDS] == raw["eagle_config"][LAYER_IDS] == list(TAPS)
    assert raw["eagle_config"]["use_aux_hidden_state"] is True
    assert raw["draft_vocab_size"] == len(DRAFT_IDS) and raw["target_hidden_size"] == HIDDEN
    assert raw["norm_before_residual"] is False  # absent, it would mean different things
    assert raw.get("ptd_token_id") == (MASK_ID if method == "p-eagle" else None)
    tensors = read_tensors(tmp_path / "head")
    if method == "p-eagle":
        assert tensors["mask_hidden"].shape == (1, 1, 3 * HIDDEN)
    assert tensors["t2d"].dtype == torch.bool and tensors["t2d"].shape == (VOCAB,)
    assert tensors["t2d"].nonzero().flatten().tolist() == DRAFT_IDS.tolist()
    assert (tensors["d2t"] + torch.arange(len(DRAFT_IDS))).tolist() == DRAFT_IDS.tolist()


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_window_as_transformers_and_vllm_read_it(
    dialect: Dialect, kind: str, tmp_path: Path
) -> None:
    head = make_head(head_config(kind=kind, sizes={"sliding_window": 9}))
    save_drafter(head, tmp_path / "head", dialect)
    raw = raw_config(tmp_path / "head")
    keys = raw.get("transformer_layer_config", raw)
    config = {"llama": LlamaConfig, "qwen3": Qwen3Config}[kind](**keys)
    assert config.layer_types == ["sliding_attention"] * 3 and config.sliding_window == 9
    keys["layer_types"] = ["full_attention"] * 3
    (tmp_path / "head" / "config.json").write_text(json.dumps(raw))
    assert read_config(tmp_path / "head").transformer.sliding_window is None, "as in vLLM"


def test_what_speculators_reads(target: Any, tmp_path: Path) -> None:
    head = make_head(head_config(depths=6, provenance=provenance_of(target)))
    save_drafter(head, tmp_path / "head", "speculators")
    raw = raw_config(tmp_path / "head")
    assert raw["speculators_model_type"] == "peagle" and raw["mask_token_id"] == MASK_ID
    assert raw[LAYER_IDS] == list(TAPS) and raw["transformer_layer_config"]["hidden_size"] == HIDDEN
    speculators = raw["speculators_config"]
    assert speculators["proposal_methods"][0]["speculative_tokens"] == 6
    assert speculators["verifier"]["name_or_path"] == "tiny-0"


@pytest.mark.parametrize("dialect", DIALECTS)
def test_exports_have_the_table(dialect: Dialect, target: Any, tmp_path: Path) -> None:
    head = make_head(head_config(embedding="mask-row"), target=target)
    save_drafter(head, tmp_path / "head", dialect, dtype=None)
    tensors = read_tensors(tmp_path / "head")
    if dialect == "native":
        assert tensors["mask_embedding"].shape == (HIDDEN,) and "embed_tokens.weight" not in tensors
        return
    wanted = target.embedding.clone()
    wanted[MASK_ID] = head.mask_embedding.detach()
    assert "mask_embedding" not in tensors
    assert torch.equal(tensors["embed_tokens.weight"], wanted)


def test_speculators_peagle_with_fc_norm_is_refused(tmp_path: Path) -> None:
    head = make_head(head_config(fc_norm=True))
    with refused("to"):
        save_drafter(head, tmp_path / "head", "speculators")
    assert list(tmp_path.iterdir()) == []


def test_saving_again_replaces_the_head_and_keeps_its_card(target: Any, tmp_path: Path) -> None:
    save_drafter(make_head(head_config()), tmp_path / "head")
    (tmp_path / "head" / "README.md").write_text("card")
    (tmp_path / "head" / "stale.safetensors").write_bytes(b"")
    second = make_head(head_config(), seed=1)
    save_drafter(second, tmp_path / "head", dtype=None)
    same_tensors(load_drafter(tmp_path / "head", target).state_dict(), second.state_dict())
    assert (tmp_path / "head" / "README.md").read_text() == "card"
    assert [path.name for path in tmp_path.iterdir()] == ["head"]


def test_a_link_to_a_head_stays(target: Any, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "head").symlink_to(tmp_path / "disk" / "mine")
    for seed in range(3):
        head = make_head(head_config(), seed=seed)
        save_drafter(head, tmp_path / "head", dtype=None)
        same_tensors(load_drafter(tmp_path / "head", target).state_dict(), head.state_dict())
    assert (tmp_path / "head").is_symlink()
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["mine"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "head"]


def test_other_names_of_the_first_layer(target: Any, tmp_path: Path) -> None:
    head = make_head(head_config())
    save_drafter(head, tmp_path / "head", dtype=None)
    file = tmp_path / "head" / "model.safetensors"
    tensors = load_file(file)
    renamed = {n.replace("layers.0.", "midlayer."): t for n, t in tensors.items()}
    assert renamed.keys() != tensors.keys()
    renamed["model.norm.weight"] = renamed.pop("norm.weight")
    renamed["mask_hidden"] = renamed["mask_hidden"][0]  # (1, 3H) is seen too
    save_file(renamed, file)
    same_tensors(load_drafter(tmp_path / "head", target).state_dict(), head.state_dict())


@pytest.mark.parametrize(
    "where",
    [
        {"dflash_config": {"mask_token_id": 7}, "mask_token_id": 8},
        {"mask_token_id": 7, "dspark_noise_token_id": 8},
        {"dspark_noise_token_id": 7, "pard_token": 8},
        {"pard_token": 7, "ptd_token_id": 8},
        {"ptd_token_id": 7},
    ],
    ids=lambda where: next(iter(where)),
)
def test_mask_id_under_each_of_vllms_keys(where: dict[str, Any], tmp_path: Path) -> None:
    save_drafter(make_head(head_config()), tmp_path / "head")
    change_config(tmp_path / "head", ptd_token_id=None)
    change_config(tmp_path / "head", **where)
    config = read_config(tmp_path / "head")
    assert (config.method, config.mask_token_id) == ("p-eagle", 7)


def test_without_a_mask_id_it_is_an_eagle3_head(tmp_path: Path) -> None:
    save_drafter(make_head(head_config()), tmp_path / "head")
    change_config(tmp_path / "head", ptd_token_id=None, peagle=None)
    assert read_config(tmp_path / "head").method == "eagle3"


def test_norm_before_fc_inside_eagle_config(tmp_path: Path) -> None:
    save_drafter(make_head(head_config(norm_before_fc=True)), tmp_path / "head")
    nested = {"norm_before_fc": True, LAYER_IDS: list(TAPS)}
    change_config(tmp_path / "head", norm_before_fc=None, eagle_config=nested)
    assert read_config(tmp_path / "head").norm_before_fc
    change_config(tmp_path / "head", eagle_config={}, norm_before_fc=True)
    assert read_config(tmp_path / "head").norm_before_fc


@pytest.mark.parametrize(
    ("method", "dialect", "default"),
    [
        ("p-eagle", "vllm", False),
        ("eagle3", "vllm", False),
        ("p-eagle", "speculators", False),
        ("eagle3", "speculators", True),
    ],
)
def test_norm_before_residual(method: str, dialect: Dialect, default: bool, tmp_path: Path) -> None:
    save_drafter(make_head(head_config(method)), tmp_path / "head", dialect)
    assert read_config(tmp_path / "head").norm_before_residual is False
    change_config(tmp_path / "head", norm_before_residual=None)
    assert read_config(tmp_path / "head").norm_before_residual is default


def test_layer_ids_in_either_place_or_by_default(tmp_path: Path) -> None:
    save_drafter(make_head(head_config()), tmp_path / "head")
    change_config(tmp_path / "head", eagle_config={})
    assert read_config(tmp_path / "head").feature_layers == TAPS
    nested = {LAYER_IDS: [0, 2, 3]}
    change_config(tmp_path / "head", eagle_config=nested, **{LAYER_IDS: None})
    assert read_config(tmp_path / "head").feature_layers == (0, 2, 3)
    change_config(tmp_path / "head", eagle_config={})
    assert read_config(tmp_path / "head", target_layers=30).feature_layers == (2, 15, 27)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("rope", [YARN, {"rope_type": "default", "rope_theta": 300.0}])
def test_rope_of_transformers_4(rope: dict[str, Any], dialect: Dialect, tmp_path: Path) -> None:
    """It knows `rope_theta` and `rope_scaling`, and takes a base of 10,000 without the first."""
    head = make_head(head_config("eagle3", sizes={"rope_parameters": rope}))
    save_drafter(head, tmp_path / "head", dialect)
    raw = raw_config(tmp_path / "head")
    raw = raw.get("transformer_layer_config", raw)
    assert raw["rope_theta"] == rope["rope_theta"]
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    assert raw["rope_scaling"] == (scaling if rope is YARN else None)
    assert read_config(tmp_path / "head").transformer.rope_parameters == rope


@pytest.mark.parametrize("method", ["p-eagle", "eagle3"])
def test_others_heads_share_the_targets_table(method: str, target: Any, tmp_path: Path) -> None:
    """SpecForge and SafeAILab write no embedding, no `peagle` block and old names for RoPE."""
    head = make_head(head_config(method, "shared"))
    save_drafter(head, tmp_path / "head", dtype=None)
    old = {"rope_theta": 300.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    change_config(tmp_path / "head", peagle=None, rope_parameters=None, **old)
    loaded = load_drafter(tmp_path / "head", target)
    assert loaded.config.embedding == "shared"
    assert torch.equal(loaded.embed(torch.arange(VOCAB)), target.embedding)
    rope = loaded.config.transformer.rope_parameters
    assert (rope["rope_theta"], rope["rope_type"], rope["factor"]) == (300.0, "linear", 2.0)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_head_of_another_width_than_its_target(dialect: Dialect, tmp_path: Path) -> None:
    """It has a table of its own."""
    narrow = tiny_target(hidden_size=20, head_dim=8)
    head = make_head(head_config(target_hidden_size=20), target=narrow)
    save_drafter(head, tmp_path / "head", dialect, dtype=None)
    loaded = load_drafter(tmp_path / "head", narrow)
    same_tensors(loaded.state_dict(), head.state_dict())
    assert loaded.shared_embedding is None
    ids, features = torch.tensor([3, 9]), torch.ones(2, 3 * 20)
    out = loaded(ids, loaded.project(features), torch.arange(2), CausalAttend())
    assert out.normed.shape == (2, HIDDEN) and out.normed.isfinite().all()


def test_a_full_draft_vocabulary_needs_no_d2t(target: Any, tmp_path: Path) -> None:
    sizes = {"draft_vocab_size": PLAIN["vocab_size"]}
    head = Drafter(head_config("eagle3", **sizes))
    save_drafter(head, tmp_path / "head", dtype=None)
    file = tmp_path / "head" / "model.safetensors"
    save_file({n: t for n, t in load_file(file).items() if n not in ("d2t", "t2d")}, file)
    loaded = load_drafter(tmp_path / "head", target)
    assert loaded.target_ids.tolist() == list(range(VOCAB))


def test_depths_are_the_recorded_ones(tmp_path: Path) -> None:
    """Foreign heads: speculators' record a number of tokens, vLLM's none."""
    save_drafter(make_head(head_config(depths=5)), tmp_path / "vllm", "vllm")
    save_drafter(make_head(head_config(depths=5)), tmp_path / "speculators", "speculators")
    for folder in ("vllm", "speculators"):
        assert read_config(tmp_path / folder).depths == 5
        change_config(tmp_path / folder, peagle=None)
    assert read_config(tmp_path / "vllm").depths is None
    assert read_config(tmp_path / "speculators").depths == 5
