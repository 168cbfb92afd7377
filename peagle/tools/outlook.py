"""The outlook of a model on this machine, from its name: how it will run, and what a head takes."""

import time
from contextlib import suppress
from pathlib import Path

import torch

from peagle.backends.choose import choose_backend
from peagle.backends.cpu.target import NativeTarget
from peagle.backends.own_code import OwnCodeTarget
from peagle.catalog import known_entry
from peagle.engine.costs import Curve, row_counts
from peagle.engine.drafting import AUTO_NODES
from peagle.engine.kept_costs import kept_curve
from peagle.engine.setup import MAX_BATCH, token_bytes
from peagle.engine.shared import weight_sizes
from peagle.model.base_target import BaseTarget
from peagle.model.loader import described_target, locate
from peagle.model.partial import outline
from peagle.model.tensors import free_memory
from peagle.tools.plan import GIB

SAMPLE = 2**26  # float32 numbers that are read to measure memory
MAX_K = 16  # of heads whose kept costs are looked for
RUNS = {
    "cpu": "by the model's own code, with native products and attention",
    "cuda": "on the GPU, where the native engine is not tuned: vLLM serves the same heads",
    "torch": "by PyTorch alone, which is slower",
}
# Acceptance length by millions of answer tokens.
CURVE = {2.6: 2.02, 12.0: 3.77, 24.0: 4.48, 34.5: 4.70}
CURVE_SOURCE = "P-EAGLE for smollm2-135m, K = 8, held-out answers: docs/training.md"
# From benchmarks/results/training_speed.json: P-EAGLE.
TRAINED_A_SECOND = 498.2  # answer tokens
TRAINED_WEIGHTS = 134_515_008  # of the target
HOURS_SOURCE = "hours of two cores of an AMD EPYC, in proportion to the target's weights"


def outlook(name: str, device: str) -> dict[str, str]:
    """Facts by their headings. Weights are not downloaded. Raises InputError as `load_target`."""
    local = device == "cpu" and Path(locate(name)[0]).is_dir()
    described = described_target(name) if local else None
    target = described or outline(name)
    runs = RUNS[choose_backend(torch.device(device), target.dtype).name]
    if described is not None and runs == RUNS["cpu"]:
        runs = "natively: all layers in one call of native code"
    weights = sum(shape.numel() for _, shape in weight_sizes(target))
    size = weights * target.dtype.itemsize / GIB
    dtype = str(target.dtype).removeprefix("torch.")
    free = free_memory(torch.device(device)) / GIB
    cache = f"{token_bytes(target, None) / 1024:.1f} KiB of KV cache a token"
    return {
        "family": str(target.config.model_type),
        "runs": runs,
        "memory": f"{size:.2f} GiB of {dtype} weights, {cache}; {free:.1f} GiB are free",
        "tokens a second": _kept_pace(target, device) or _expected_pace(size, device),
        "known heads": _heads(name),
        "a new head": _training(weights),
    }


def _kept_pace(target: BaseTarget, device: str) -> str | None:
    """Tokens a second of one request without drafts, as an earlier run measured them."""
    decisive = (weight_sizes(target), target.dtype, target.quantize)
    batch = MAX_BATCH[torch.device(device).type]
    for kind in (NativeTarget, OwnCodeTarget):
        for k in range(MAX_K + 1):
            rows = row_counts(batch + max(batch * k, AUTO_NODES))
            with suppress(LookupError):
                kept = kept_curve(rows, (kind, *decisive), torch.device(device), _not_kept)
                return f"{1 / kept.curve(1):.1f} without drafts, measured by an earlier run"
    return None


def _not_kept() -> Curve:
    raise LookupError


def _expected_pace(size: float, device: str) -> str:
    """The same, from the time in which this machine reads as much memory."""
    numbers = torch.ones(SAMPLE, device=device)
    seconds = list[float]()
    for _ in range(4):
        started = time.perf_counter()
        numbers.sum().item()
        seconds.append(time.perf_counter() - started)
    speed = numbers.nbytes / min(seconds) / GIB
    found = f"at most {speed / size:.1f} without drafts, estimated: all weights are read for each"
    return f"{found}, at the {speed:.1f} GiB a second that were measured here"


def _heads(name: str) -> str:
    """The catalog's heads for the model, with their acceptance lengths."""
    entry = known_entry(name)
    found = list[str]()
    for method, head in (entry.heads if entry else {}).items():
        rows = [f"{row.dataset} {row.length:.2f} (K = {row.k})" for row in head.acceptance]
        found.append(f"{method}: {', '.join(rows) or 'acceptance not known'}")
    return "; ".join(found) or "none; lookup drafts without one"


def _training(weights: int) -> str:
    """Answer tokens, hours and acceptance lengths to expect."""
    speed = TRAINED_A_SECOND * TRAINED_WEIGHTS / weights
    hours = {millions: millions * 1e6 / speed / 3600 for millions in CURVE}
    found = [f"{at:g} M tokens, {hours[at]:,.1f} h: {length:.2f}" for at, length in CURVE.items()]
    sources = f"{CURVE_SOURCE}; {HOURS_SOURCE}"
    return f"answer tokens, time, acceptance length: {'; '.join(found)} ({sources})"
