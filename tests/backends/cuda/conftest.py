"""Shared fixtures of the GPU's tests."""

from typing import Any

import numpy as np
import pytest
import torch


@pytest.fixture
def plain_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrix products of Triton's interpreter whose rows do not depend on where they are in a tile,
    as on a GPU. Those of a CPU's BLAS do."""

    def product(a: Any, b: Any, dtype: Any) -> Any:
        return (a[:, :, None] * b[None]).sum(1, dtype=dtype)

    if not torch.cuda.is_available():
        monkeypatch.setattr(np, "matmul", product)
