"""The choice of a deployment's head."""

import warnings
from dataclasses import replace
from pathlib import Path

import pytest
from refusals import refused
from stand_ins import entry

from peagle.catalog import CatalogHead, Entry, find_entry
from peagle.deploy.drafting import DEFAULT_K, Drafting, choose
from peagle.errors import InputWarning

PUBLIC = CatalogHead(k=3, hub="a/e", source="web")
BOTH = entry(heads={"p-eagle": CatalogHead(k=5, hub="a/p"), "eagle3": PUBLIC})
EAGLE3 = entry(heads={"eagle3": PUBLIC})


def chosen(of: Entry, head: str | None = None, method: str | None = None,
           k: int | None = None, *, remote: bool = True) -> Drafting:  # fmt: skip
    """Without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", InputWarning)
        return choose("mine", of, Drafting(head, method, k), remote=remote)


def test_the_catalogs_head() -> None:
    assert chosen(BOTH) == Drafting("a/p", "p-eagle", 5)
    assert chosen(BOTH, k=2) == Drafting("a/p", "p-eagle", 2)
    assert chosen(BOTH, method="eagle3") == Drafting("a/e", "eagle3", 3)


def test_a_public_eagle3_head_in_the_place_of_a_p_eagle_head_is_named() -> None:
    warning = r"mine has no p-eagle head: the public eagle3 head a/e drafts \(source: web\)"
    with pytest.warns(InputWarning, match=warning):
        assert choose("mine", EAGLE3, Drafting(), remote=True) == Drafting("a/e", "eagle3", 3)
    assert chosen(EAGLE3, method="eagle3") == Drafting("a/e", "eagle3", 3)  # as asked
    unpublished = entry(heads={"eagle3": CatalogHead(k=3, hub="a/e")})
    assert chosen(unpublished) == Drafting("a/e", "eagle3", 3)


def test_no_head() -> None:
    with pytest.warns(InputWarning, match="mine has no head: nothing will draft; name one with"):
        assert choose("mine", entry(heads={}), Drafting(), remote=False).head is None
    with refused("k"):
        chosen(entry(heads={}), k=3)
    with refused("method"):
        chosen(EAGLE3, method="p-eagle")


def test_a_head_of_the_catalog_is_known_by_its_hub_id() -> None:
    assert chosen(entry(heads={}), "amazon/GPT-OSS-20B-P-EAGLE") == Drafting(
        "amazon/GPT-OSS-20B-P-EAGLE", "p-eagle", 7
    )  # fmt: skip
    assert chosen(EAGLE3, "a/e", k=2) == Drafting("a/e", "eagle3", 2)


@pytest.mark.parametrize(
    ("head", "method"), [("me/head", "p-eagle"), ("me/model-Eagle3-v2", "eagle3")]
)
def test_the_method_of_an_unknown_head_is_guessed_with_a_warning(head: str, method: str) -> None:
    warning = f"head {head}: not in the catalog, assumed to be a {method} head"
    with pytest.warns(InputWarning, match=warning):
        found = choose("mine", entry(), Drafting(head), remote=True)
    assert found == Drafting(head, method, DEFAULT_K)
    assert chosen(entry(), head, "eagle3", 2) == Drafting(head, "eagle3", 2)
    here = chosen(entry(), head, remote=False)
    assert (here.head, here.k) == (head, None)  # read where it is served


def test_a_folder_is_for_this_machine(tmp_path: Path) -> None:
    found = chosen(entry(), str(tmp_path), remote=False)
    assert (found.head, found.k) == (str(tmp_path), None)
    with refused("head"):
        chosen(entry(), str(tmp_path))
    for remote in (True, False):
        with refused("head"):
            chosen(entry(), "runs/a/head", remote=remote)


def test_the_demo_targets_heads() -> None:
    """Its P-EAGLE head is found by the target's name, in an image too."""
    demo = find_entry("smollm2-135m")
    assert chosen(demo) == chosen(demo, remote=False) == Drafting(None, "p-eagle", None)
    found = chosen(demo, method="eagle3", remote=False)
    assert str(found.head).endswith("smollm2-135m-eagle3")
    with refused("head"):
        chosen(demo, method="eagle3")


def test_a_demo_head_that_is_not_installed(tmp_path: Path) -> None:
    demo = find_entry("smollm2-135m")
    head = replace(demo.heads["p-eagle"], folder=tmp_path / "gone")
    gone = replace(demo, heads={**demo.heads, "p-eagle": head})
    with pytest.warns(InputWarning, match="the p-eagle head of smollm2-135m is not here"):
        choose("smollm2-135m", gone, Drafting(), remote=False)
    assert chosen(demo) == Drafting(None, "p-eagle", None)  # an image has it
