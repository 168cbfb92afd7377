"""Quantised weights kept in the user's cache as they are laid out: the next start reads them.

A file is safetensors, with the sizes of its matrices in the header. Its name has the digests of the
target's files and the processor, of the code that laid them out and of its own content.
"""

import json
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from inspect import getsource
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryDirectory

from psutil import pid_exists
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from peagle.backends.cpu import matrix
from peagle.backends.cpu.library import fingerprint, load, processor
from peagle.backends.cpu.matrix import Place, Weights
from peagle.backends.cpu.pages import LargePages
from peagle.files import kept_digest, replacing, sha256, share
from peagle.model import int8
from peagle.model.described import DescribedTarget
from peagle.model.int8 import SCALE
from peagle.paths import cache_dir, digest

log = logging.getLogger(__name__)


def keep_packed(
    target: DescribedTarget, make: Callable[[Place], dict[str, Weights]]
) -> dict[str, Weights]:
    """The weights of a target's products, in large pages: those of an earlier start, else made and
    kept. Weights that are not rounded are not kept: they lie in the target's files."""
    place = LargePages().copy
    if not target.quantize or not target.digests:
        return make(place)
    source = digest(repr((target.digests, target.quantize, target.dtype, processor())).encode())
    code = fingerprint(), load().tiles, getsource(matrix), getsource(int8)
    folder = cache_dir() / "packed"
    key = f"{source}-{digest(repr(code).encode())}"
    for file in folder.glob(f"{key}-*.safetensors"):
        with suppress(OSError, SafetensorError):
            if file.stem.endswith(kept_digest(file)[:16]):
                return _read(file, target, place)
    made = make(place)
    try:
        for old in folder.glob(f"{source}-*"):  # of other versions here, or damaged
            old.unlink(missing_ok=True)
        _write(folder, key, made)
    except OSError as error:
        log.warning("quantised weights are not kept for the next start: %s", error)
    return made


def _read(file: Path, target: DescribedTarget, place: Place) -> dict[str, Weights]:
    with safe_open(file, framework="pt") as opened:
        names = opened.keys()
        tensors = {name: place(opened.get_tensor(name)) for name in names}
        sizes = json.loads(opened.metadata()["sizes"])
    return {
        name: Weights(tensors[name], tensors.get(name + SCALE), bits, tiled, target.dtype, *shape)
        for name, (bits, tiled, *shape) in sizes.items()
    }


def _write(folder: Path, key: str, weights: dict[str, Weights]) -> None:
    """Raises OSError."""
    tensors = {name: each.data for name, each in weights.items()}
    tensors |= {name + SCALE: w.scales for name, w in weights.items() if w.scales is not None}
    sizes = {name: (w.bits, w.tiled, w.outputs, w.inputs) for name, w in weights.items()}
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(".making-*"):  # of killed processes; in a container ids recur
        pid = int(left.name.split("-")[1])
        if pid == os.getpid() or not pid_exists(pid):
            rmtree(left, ignore_errors=True)
    with TemporaryDirectory(dir=folder, prefix=f".making-{os.getpid()}-") as scratch:
        file = Path(scratch) / f"{key}.safetensors"
        with replacing(file) as made:
            save_file(tensors, made, {"sizes": json.dumps(sizes)})
            share(made)
        file.rename(folder / f"{key}-{sha256(file)[:16]}.safetensors")
