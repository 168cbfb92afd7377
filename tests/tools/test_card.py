"""A saved head says in its README.md what its config.json records."""

from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from tiny_heads import head_config, make_head

from peagle.heads.save import save_drafter
from peagle.model.config import CorrectionConfig, Provenance
from peagle.tools.card import HERE, MARK, model_card, write_card


@pytest.fixture
def head(tmp_path: Path) -> Path:
    save_drafter(make_head(head_config()), tmp_path / "head")
    return tmp_path / "head"


def test_the_card_is_written_again_with_the_head(head: Path) -> None:
    write_card(head)
    first = ModelCard.load(head / "README.md")
    assert first.data.library_name == "peagle" and MARK in first.text
    measured = Provenance(acceptance={"held out": {"k": 8, "acceptance_length": 1.4}})
    save_drafter(make_head(head_config(provenance=measured)), head)
    write_card(head)
    assert "| held out | 8 | 1.40 |" in (head / "README.md").read_text()


def test_a_card_of_the_users_own_is_kept(head: Path) -> None:
    mine = "---\nlicense: mit\n---\nmine"
    (head / "README.md").write_text(mine)
    write_card(head)
    assert (head / "README.md").read_text() == mine


def test_the_card_says_what_is_recorded() -> None:
    known = Provenance(
        "owner/base@main",
        data={"answer_tokens": 810080, "sources": "chat"},
        acceptance={
            "humaneval": {"3": 1.5, "7": 1.625},
            "held out": {"k": 8, "acceptance_length": 1.4, "accepted_per_position": [0.4]},
        },
    )
    card = model_card(head_config(embedding="mask-row", provenance=known))
    assert card.data.base_model == "owner/base" and card.data.license is None
    assert set(card.data.tags) == {"p-eagle", "speculative-decoding", "eagle3"}
    assert "# P-EAGLE head for owner/base\n" in card.text
    assert "- answer tokens: 810,080\n- sources: chat\n" in card.text
    for row in ("| humaneval | 3 | 1.50 |", "| humaneval | 7 | 1.62 |", "| held out | 8 | 1.40 |"):
        assert row in card.text.splitlines()
    assert f"peagle generate owner/base --head {HERE}" in card.text
    export = "peagle export FOLDER head-for-vllm --to vllm --target owner/base"
    assert f"{export}\nhf upload {HERE} head-for-vllm\n" in card.text
    assert f"peagle deploy owner/base --head {HERE} --to kubernetes" in card.text
    assert '"parallel_drafting": true' in card.text


def test_the_card_of_a_corrected_head() -> None:
    card = model_card(head_config(correction=CorrectionConfig(8, 5)))
    plugin = "vLLM runs the head with that only where the plugin `peagle-vllm` is installed"
    assert f"(`correction/`, rank 8).\n{plugin} (vLLM 0.32).\n" in card.text


def test_a_catalog_name_in_another_case() -> None:
    card = model_card(head_config(provenance=Provenance("SmolLM2-135M")))
    assert f"peagle generate SmolLM2-135M --head {HERE}" in card.text


def test_the_card_of_a_head_that_records_nothing(tmp_path: Path) -> None:
    config = head_config("eagle3")
    for target in ("", str(tmp_path), "/somewhere/private/base"):
        card = model_card(replace(config, provenance=Provenance(target)))
        assert card.data.base_model is None and card.text.count("Not recorded") == 2
        assert "/somewhere" not in str(card) and str(tmp_path) not in str(card)
        assert "export" not in card.text and f'"model": "{HERE}"' in card.text
        assert f"\nhf upload {HERE} FOLDER\n" in card.text
        assert "parallel_drafting" not in card.text and "p-eagle" not in card.data.tags
