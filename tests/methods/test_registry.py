"""The catalog's facts about the methods, known without torch, agree with the methods."""

from refusals import refused

from peagle import catalog
from peagle.bench.report import COLOURS, title
from peagle.methods.registry import DEFAULT, METHODS

from tiny_heads import head_config  # isort: skip


def test_the_catalog_knows_them() -> None:
    assert tuple(METHODS) == catalog.METHODS and catalog.METHODS[0] == DEFAULT
    parallel = [name for name, method in METHODS.items() if method.parallel]
    assert parallel == list(catalog.PARALLEL_METHODS)
    assert all(method.name == name for name, method in METHODS.items())


def test_reports_show_them() -> None:
    assert set(COLOURS) == {*catalog.HEADLESS, *METHODS}
    assert title("p-eagle") == "P-EAGLE" and title("none") == "none"


def test_a_config_of_another_method() -> None:
    with refused("mask_token_id"):
        METHODS["p-eagle"].build(head_config("p-eagle", "full", mask_token_id=None))
