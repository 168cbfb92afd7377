"""Names of models as people and clients see them."""

from pathlib import Path

import pytest

from peagle.shown import model_name


@pytest.mark.parametrize(
    ("target", "shown"),
    [
        ("smollm2-135m", "smollm2-135m"),
        ("Qwen/Qwen2.5-0.5B@main", "Qwen/Qwen2.5-0.5B@main"),
        ("/models/qwen2.5-coder-0.5b-q4_k_m.gguf", "qwen2.5-coder-0.5b-q4_k_m"),
        ("models/a.gguf", "a"),
        ("~/a.gguf", "a"),
        ("~no-such-user/a.gguf", "a"),
        ("/gone/Qwen2.5-0.5B", "Qwen2.5-0.5B"),
        ("./gone/", "gone"),
        ("here/Qwen2.5", "Qwen2.5"),
        (".", "here"),
    ],
)
def test_models(target: str, shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hub ids and names of the catalog stay, unless a folder has that name."""
    (tmp_path / "here" / "here" / "Qwen2.5").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    assert model_name(target) == shown
