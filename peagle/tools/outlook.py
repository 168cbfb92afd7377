"""The outlook of a model on this machine, from its name: how it will run, and what a head takes."""

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from peagle.backends.choose import choose_backend
from peagle.backends.cpu.target import NativeTarget
from peagle.backends.own_code import OwnCodeTarget
from peagle.catalog import CatalogHead, how_to_get, known_entry
from peagle.engine.costs import Curve, kept_curve, measure, row_counts, seconds_of
from peagle.engine.drafting import AUTO_NODES
from peagle.engine.setup import MAX_BATCH, token_bytes
from peagle.engine.shared import weight_sizes
from peagle.model.base_target import BaseTarget
from peagle.model.describe import describe
from peagle.model.loader import described_target, locate
from peagle.model.partial import outline
from peagle.model.tensors import free_memory
from peagle.tools.plan import GIB

SAMPLE = 2**26  # float32 numbers that are read to measure memory
MAX_K = 16  # of heads whose kept costs are looked for
RUNS = {
    "native": "natively: all layers in one call of native code",
    "cpu": "by the model's own code, with native products and attention",
    "cuda": "on the GPU, where the native engine is not tuned: vLLM serves the same heads",
    "torch": "by PyTorch alone, which is slower",
}
# Acceptance length by millions of answer tokens.
CURVE = {2.6: 2.02, 12.0: 3.77, 24.0: 4.48, 34.5: 4.70, 58.7: 4.92}
CURVE_SOURCE = "P-EAGLE for smollm2-135m, K = 8, held-out answers: docs/training.md"
# From benchmarks/results/training_speed.json: P-EAGLE, with the target in every step.
TRAINED_A_SECOND = 200.4  # answer tokens
TRAINED_WEIGHTS = 134_515_008  # of the target
HOURS_SOURCE = "hours of two cores of an AMD EPYC, in proportion to the weights that a token reads"


def outlook(name: str, device: str) -> dict[str, str]:
    """Facts by their headings. Weights are not downloaded. Raises InputError as `load_target`."""
    local = device == "cpu" and Path(locate(name)[0]).is_dir()
    target: BaseTarget
    weights: Iterable[Tensor]
    if local and (described := described_target(name)):
        native = True
        target = described
        weights = described.tensors.values()
    else:
        target = made = outline(name)
        config = made.model.config.to_dict()
        native = "quantization_config" not in config and describe(config) is not None
        weights = made.model.parameters()
    backend = choose_backend(torch.device(device), target.dtype).name
    unit = target.dtype.itemsize / GIB
    size = unit * sum(weight.numel() for weight in weights)
    read = _weights_read(target)
    free = free_memory(torch.device(device)) / GIB
    dtype = str(target.dtype).removeprefix("torch.")
    cache = f"{token_bytes(target, None) / 1024:.1f} KiB of KV cache a token"
    enough = "are free" if size < free else "are free: too few"
    return {
        "family": str(target.config.model_type),
        "runs": RUNS["native" if native and backend == "cpu" else backend],
        "memory": f"{size:.2f} GiB of {dtype} weights, {cache}; {free:.1f} GiB {enough}",
        "tokens a second": _kept_pace(target, device) or _expected_pace(unit * read, device),
        "known heads": "none; lookup drafts without one",
        **catalogued(name),
        "a new head": _training(read),
    }


def catalogued(name: str) -> dict[str, str]:
    """Facts of the catalog, which needs neither the model nor the hub; none of a model that it does
    not know."""
    entry = known_entry(name)
    found = dict[str, str]()
    if entry and entry.gpu_memory:
        found["on GPUs, in vLLM"] = f"{entry.gpu_memory} GiB with a head and KV cache, together"
    if entry and entry.heads:
        found["known heads"] = "; ".join(_head(*each) for each in entry.heads.items())
    return found


def _head(method: str, head: CatalogHead) -> str:
    """A head of the catalog, with its acceptance lengths."""
    rows = [f"{row.dataset} {row.length:.2f} (K = {row.k})" for row in head.acceptance]
    source = head.location or how_to_get(head)
    return f"{method}, {source}: {', '.join(rows) or 'acceptance not known'}"


def _weights_read(target: BaseTarget) -> int:
    """Number of weights that the forward of a token reads: of experts, those that it chooses."""
    chosen = getattr(target.config, "num_experts_per_tok", 0)
    read = 0
    for name, shape in weight_sizes(target):
        routed = chosen and ".experts." in name  # (experts, ...)
        read += shape.numel() // shape[0] * chosen if routed else shape.numel()
    return read


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
    seconds = measure(seconds_of(lambda _: numbers.sum().item()), [1])
    speed = numbers.nbytes / seconds(1) / GIB
    found = f"at most {speed / size:.1f} without drafts, estimated: each reads {size:.2f} GiB"
    return f"{found}, at the {speed:.1f} GiB a second that were measured here"


def _training(weights: int) -> str:
    """Answer tokens, hours and acceptance lengths to expect."""
    speed = TRAINED_A_SECOND * TRAINED_WEIGHTS / weights
    found = []
    for millions, length in CURVE.items():
        hours = millions * 1e6 / speed / 3600
        found.append(f"{millions:g} M answer tokens take {hours:,.1f} h and reach {length:.2f}")
    return f"acceptance length: {'; '.join(found)} ({CURVE_SOURCE}; {HOURS_SOURCE})"
