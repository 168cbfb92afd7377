"""A target of which embedding, last norm and output head are read alone equals the whole one."""

from pathlib import Path

import pytest
import torch
from families import FAMILIES, build
from json_files import change_json, read_json
from refusals import refused
from safetensors.torch import load_file, save_file
from tiny import make_tokenizer

from peagle.data.captured import target_hashes
from peagle.model.loader import load_target
from peagle.model.partial import PartialTarget, load_partial
from peagle.train.passes import logits_of
from peagle.vllm.capture import last_norm

INDEX = "model.safetensors.index.json"


def saved(folder: Path, family: str) -> str:
    """A folder of files of 10 kB, as a large model has several."""
    build(FAMILIES[family]()).save_pretrained(folder, max_shard_size="10kB")
    make_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("family", FAMILIES)
def test_it_equals_the_whole_target(tmp_path: Path, family: str) -> None:
    """Logits of some tokens, hashes, and the last layers, as captured training reads them."""
    name = saved(tmp_path, family)
    part, whole = load_partial(name, layers=2), load_target(name)
    assert isinstance(part, PartialTarget)
    assert target_hashes(part) == target_hashes(whole) and part.dtype == whole.dtype
    assert torch.equal(part.embedding, whole.embedding) and part.num_layers == whole.num_layers
    ids, hidden = torch.tensor([5, 3, 66]), torch.randn(6, 32)
    assert torch.equal(logits_of(part, ids)(hidden), logits_of(whole, ids)(hidden))
    assert torch.equal(part.logits(hidden), whole.logits(hidden))
    for layer in range(whole.num_layers)[-2:]:
        found, state = part.layer_state(layer), whole.layer_state(layer)
        for key in found.keys() & state.keys():
            assert torch.equal(found[key], state[key]), key
    assert part.tokenizer is not None


@pytest.mark.parametrize("family", [*FAMILIES])
def test_its_last_norm_is_that_of_the_whole_target(tmp_path: Path, family: str) -> None:
    """A capture by vLLM makes the last hidden states by it."""
    name = saved(tmp_path, family)
    found, wanted = last_norm(load_partial(name)), last_norm(load_target(name))
    state = torch.randn(5, 32)
    assert torch.equal(found(state), wanted(state))


def test_other_files_are_not_read(tmp_path: Path) -> None:
    """A target of 120B need not be there for an export."""
    name = saved(tmp_path, "llama")
    needed = load_partial(name)
    places = read_json(tmp_path / INDEX)["weight_map"]
    outer = {file for key, file in places.items() if ".1." not in key and ".2." not in key}
    for file in set(places.values()) - outer:
        (tmp_path / file).unlink()
    assert torch.equal(load_partial(name).embedding, needed.embedding)
    with refused("target"):
        load_target(name)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    name = saved(tmp_path, "llama")
    places = read_json(tmp_path / INDEX)["weight_map"]
    (tmp_path / places["lm_head.weight"]).unlink()
    with refused("target") as error:
        load_partial(name)
    assert places["lm_head.weight"] in str(error.value)
    (tmp_path / INDEX).write_text("{}")
    with refused("target"):
        load_partial(name)


@pytest.mark.parametrize("missing", ["lm_head.weight", "model.embed_tokens.weight"])
def test_tensors_that_are_not_there(tmp_path: Path, missing: str) -> None:
    name = saved(tmp_path, "llama")
    places = read_json(tmp_path / INDEX)["weight_map"]
    del places[missing]
    change_json(tmp_path / INDEX, weight_map=places)
    with refused("target") as error:
        load_partial(name)
    assert missing in str(error.value)


@pytest.mark.parametrize("equal", [True, False])
def test_a_head_in_the_files_of_a_tied_target(tmp_path: Path, equal: bool) -> None:
    """transformers uses it; the whole target is loaded where it is not the embedding."""
    name = saved(tmp_path, "llama")
    if equal:
        files = read_json(tmp_path / INDEX)["weight_map"]
        table = load_file(tmp_path / files["model.embed_tokens.weight"])[
            "model.embed_tokens.weight"
        ]
        save_file({"lm_head.weight": table}, tmp_path / files["lm_head.weight"], {"format": "pt"})
    change_json(tmp_path / "config.json", tie_word_embeddings=True)
    part, hidden = load_partial(name), torch.randn(5, 32)
    assert isinstance(part, PartialTarget) == equal
    assert torch.equal(part.logits(hidden), load_target(name).logits(hidden))


@pytest.mark.parametrize("family", ["llama", "gemma4_multimodal"])
def test_quantised_weights_need_the_whole(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of fp8 have the same names, but other values."""
    name = saved(tmp_path, family)
    change_json(tmp_path / "config.json", quantization_config={"quant_method": "fp8"})
    monkeypatch.setattr("peagle.model.partial.load_target", lambda name, device: (name, device))
    assert load_partial(name) == (name, "cpu")
