"""`peagle export`: both dialects decode the same tokens as the head they were made of."""

import shutil
from pathlib import Path

import pytest
from json_files import change_json, read_json
from runner import invoke, printed
from safetensors import safe_open
from tiny import METHODS

ASK = ("the cat sat", "--max-tokens", 30, "--dtype", "float32", "--head")


@pytest.mark.parametrize("dialect", ["vllm", "speculators"])
@pytest.mark.parametrize("method", METHODS)
def test_exported_head_drafts_the_same(
    target: Path, heads: dict[str, Path], tmp_path: Path, method: str, dialect: str
) -> None:
    out = tmp_path / "out"
    assert (
        f"wrote {out} ({dialect})" in invoke("export", heads[method], out, "--to", dialect).stderr
    )
    config = read_json(out / "config.json")
    assert ("speculators_model_type" in config) == (dialect == "speculators")
    with safe_open(out / "model.safetensors", "pt") as tensors:
        assert ("embed_tokens.weight" in tensors.keys()) == (method == "p-eagle")  # noqa: SIM118
    results = [printed("generate", target, *ASK, head, "--k", 4) for head in (heads[method], out)]
    for result in results:
        del result["tokens_per_second"]
    assert results[0] == results[1]


def test_output_must_be_new(
    refused, heads: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it is empty: a folder such as `.` or a mount point cannot be replaced."""
    (tmp_path / "file").write_text("kept")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    for taken in (tmp_path / "file", tmp_path, tmp_path / "empty", "."):
        line = refused("export", heads["p-eagle"], taken, "--to", "vllm", field="output")
        assert line.endswith(f"output {taken}: exists already; name a new one")
    assert (tmp_path / "file").read_text() == "kept"


def test_unknown_dialect(refused, heads: dict[str, Path], tmp_path: Path) -> None:
    refused("export", heads["p-eagle"], tmp_path / "out", "--to", "onnx", field="to")


def test_other_target(refused, other_target: Path, heads: dict[str, Path], tmp_path: Path) -> None:
    command = ("export", heads["p-eagle"], tmp_path / "out", "--to", "vllm")
    line = refused(*command, "--target", other_target)
    assert "does not fit" in line
    invoke(*command, "--target", other_target, "--force")
    assert (tmp_path / "out" / "config.json").is_file()


def test_a_head_that_names_no_target(refused, heads: dict[str, Path], tmp_path: Path) -> None:
    head = shutil.copytree(heads["eagle3"], tmp_path / "head")
    command = ("export", head, tmp_path / "out", "--to", "vllm")
    config = read_json(head / "config.json")
    change_json(head / "config.json", peagle=config["peagle"] | {"provenance": {}})
    assert "name it with --target" in refused(*command)
    layers = {"eagle_aux_hidden_state_layer_ids": None, "eagle_config": None}
    change_json(head / "config.json", **layers, peagle=None)
    assert "name it with --target" in refused(*command), "also of one that names no layers"
