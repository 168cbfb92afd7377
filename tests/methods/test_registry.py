"""What is said of the methods where torch is not imported agrees with the methods themselves."""

import pytest

from peagle import catalog
from peagle.bench.plots import read_methods
from peagle.errors import InputError
from peagle.methods.registry import DEFAULT, METHODS

from tiny_heads import head_config  # isort: skip


def test_the_catalog_knows_them() -> None:
    assert tuple(METHODS) == catalog.METHODS and catalog.METHODS[0] == DEFAULT
    parallel = [name for name, method in METHODS.items() if method.parallel]
    assert parallel == list(catalog.PARALLEL_METHODS)
    assert all(method.name == name for name, method in METHODS.items())


def test_reports_show_them() -> None:
    assert set(read_methods()) == {*catalog.HEADLESS, *METHODS}
    assert read_methods()["p-eagle"].title == "P-EAGLE" and read_methods()["none"].title == "none"


def test_a_config_of_another_method() -> None:
    with pytest.raises(InputError, match="a p-eagle head needs mask_token_id"):
        METHODS["p-eagle"].build(head_config("p-eagle", "full", mask_token_id=None))
