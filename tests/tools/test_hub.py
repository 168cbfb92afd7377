"""Heads are uploaded whole, in one commit; what goes wrong is one line that names the way out."""

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hub_server import TOKEN, HubServer
from huggingface_hub import HfApi, ModelCard, constants
from tiny_heads import head_config, make_head

from peagle.errors import InputError
from peagle.methods.checkpoint import read_config, read_tensors
from peagle.methods.save import save_drafter
from peagle.model.config import Provenance
from peagle.tools.hub import model_card, push_head

REPO = "someone/a-head"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    # Xet, the hub's other way to store large files, has a server of its own: LFS is asked for.
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    server = HubServer()
    yield server
    server.close()


@pytest.fixture
def api(hub: HubServer) -> HfApi:
    return HfApi(endpoint=hub.url, token=TOKEN)


@pytest.fixture
def head(tmp_path: Path) -> Path:
    save_drafter(make_head(head_config()), tmp_path / "head")
    return tmp_path / "head"


def test_everything_is_in_one_commit(hub: HubServer, api: HfApi, head: Path) -> None:
    (head / "optimizer.bin").write_bytes(b"not part of a head")
    before = sorted(head.iterdir())
    address = push_head(head, REPO, api=api)
    assert sorted(head.iterdir()) == before, "the user's folder stays as it was"
    [commit] = hub.commits
    assert address.startswith(hub.url) and commit["branch"] == "main"
    assert set(commit["files"]) == {"config.json", "README.md"}
    assert commit["files"]["config.json"] == (head / "config.json").read_bytes()
    tensors = (head / "model.safetensors").read_bytes()
    assert commit["large"] == {"model.safetensors": hashlib.sha256(tensors).hexdigest()}
    assert hub.objects == {hashlib.sha256(tensors).hexdigest(): tensors}
    assert hub.asked[0] == "create" and hub.asked[-1] == "commit"
    assert "preupload" in hub.asked and "batch" in hub.asked and "PUT object" in hub.asked


def test_what_is_uploaded_is_the_head(
    hub: HubServer, api: HfApi, head: Path, tmp_path: Path
) -> None:
    push_head(head, REPO, api=api)
    [commit] = hub.commits
    copy = tmp_path / "copy"
    copy.mkdir()
    for name, content in commit["files"].items():
        (copy / name).write_bytes(content)
    for name, digest in commit["large"].items():
        (copy / name).write_bytes(hub.objects[digest])
    assert read_config(copy).feature_layers == read_config(head).feature_layers
    assert read_tensors(copy).keys() == read_tensors(head).keys()
    assert ModelCard.load(copy / "README.md").data.library_name == "peagle"


def test_a_head_of_small_files_alone(
    hub: HubServer, api: HfApi, head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With Xet on, as installed: the library uploads in another way, the commit is the same."""
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
    hub.large = ()
    push_head(head, REPO, revision="small", api=api)
    [commit] = hub.commits
    assert set(commit["files"]) == {"config.json", "README.md", "model.safetensors"}
    assert (commit["branch"], commit["large"]) == ("small", {})


def test_options(hub: HubServer, api: HfApi, head: Path) -> None:
    push_head(head, REPO, private=True, revision="v2", message="Longer training", api=api)
    assert hub.made[REPO]["visibility"] == "private"
    assert hub.branches == ["v2"]
    assert (hub.commits[0]["branch"], hub.commits[0]["summary"]) == ("v2", "Longer training")
    push_head(head, REPO, revision="v2", api=api)  # repository and branch are there already
    assert len(hub.commits) == 2


def test_a_card_of_the_users_own_is_kept(hub: HubServer, api: HfApi, head: Path) -> None:
    (head / "README.md").write_text("---\nlicense: mit\n---\nmine")
    push_head(head, REPO, api=api)
    assert hub.commits[0]["files"]["README.md"] == (head / "README.md").read_bytes()


def test_a_refused_token(hub: HubServer, head: Path) -> None:
    with pytest.raises(InputError, match="answers 401: the token is not valid there.*HF_TOKEN"):
        push_head(head, REPO, api=HfApi(endpoint=hub.url, token="hf_wrong"))
    assert hub.commits == []


@pytest.mark.parametrize(
    ("status", "said"), [(403, "may not write"), (404, "no such repository"), (418, "418")]
)
def test_a_refusal(hub: HubServer, api: HfApi, head: Path, status: int, said: str) -> None:
    hub.status = status
    with pytest.raises(InputError, match=said) as refusal:
        push_head(head, REPO, api=api)
    assert "\n" not in str(refusal.value) and REPO in str(refusal.value)


def test_no_network(hub: HubServer, api: HfApi, head: Path) -> None:
    hub.close()
    with pytest.raises(InputError, match=f"{hub.url} cannot be reached") as refusal:
        push_head(head, REPO, api=api)
    assert "\n" not in str(refusal.value)


def test_no_token(head: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peagle.tools.hub.get_token", lambda: None)
    with pytest.raises(InputError, match="no Hugging Face token: run `hf auth login`"):
        push_head(head, REPO, api=HfApi())


def test_names_that_are_no_repository(api: HfApi, head: Path) -> None:
    with pytest.raises(InputError, match="name owner/name"):
        push_head(head, "a/b/c", api=api)


def test_only_heads_are_uploaded(hub: HubServer, api: HfApi, head: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such folder"):
        push_head(tmp_path / "nowhere", REPO, api=api)
    with pytest.raises(InputError, match="no config.json"):
        push_head(tmp_path, REPO, api=api)
    (head / "model.safetensors").write_bytes(b"x" * 50)
    with pytest.raises(InputError, match="corrupt"):
        push_head(head, REPO, api=api)
    assert hub.asked == []


def test_card_says_what_is_recorded() -> None:
    known = Provenance(
        "owner/base@main",
        data={"answer_tokens": 810080, "sources": "chat"},
        acceptance={
            "humaneval": {"3": 1.5, "7": 1.625},
            "held out": {"k": 8, "acceptance_length": 1.4, "accepted_per_position": [0.4]},
        },
    )
    card = model_card(head_config(embedding="mask-row", provenance=known), REPO)
    assert card.data.base_model == "owner/base" and card.data.license is None
    assert set(card.data.tags) == {"p-eagle", "speculative-decoding", "eagle3"}
    assert "- answer tokens: 810,080\n- sources: chat\n" in card.text
    for row in ("| humaneval | 3 | 1.50 |", "| humaneval | 7 | 1.62 |", "| held out | 8 | 1.40 |"):
        assert row in card.text.splitlines()
    assert f"peagle generate owner/base --head {REPO}" in card.text
    assert f"peagle export {REPO} head-for-vllm --to vllm" in card.text
    assert '"parallel_drafting": true' in card.text


def test_card_of_a_head_that_records_nothing(tmp_path: Path) -> None:
    config = head_config("eagle3")
    for target in ("", str(tmp_path), "/somewhere/private/base"):
        card = model_card(replace(config, provenance=Provenance(target)), REPO)
        assert card.data.base_model is None and card.text.count("Not recorded") == 2
        assert "/somewhere" not in str(card) and str(tmp_path) not in str(card)
        assert "export" not in card.text and f'"model": "{REPO}"' in card.text
        assert "parallel_drafting" not in card.text and "p-eagle" not in card.data.tags
