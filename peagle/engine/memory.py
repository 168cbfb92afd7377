"""Memory, and the number of tokens of KV cache that fit into it."""

from collections.abc import Sequence

from peagle.errors import InputError
from peagle.model.attention import HeadShape
from peagle.model.base_target import BaseTarget
from peagle.model.device import free_memory
from peagle.model.drafter import Drafter

SHARE = {"cpu": 0.5, "cuda": 0.85}  # share of free memory; a CPU has other things to do
MAX_BATCH = {"cpu": 8, "cuda": 64}  # by default
MIN_TOKENS = 512  # KV cache for each request of a default batch, where the context is longer


def token_bytes(target: BaseTarget, drafter: Drafter | None) -> int:
    """Bytes that the caches keep of a token: the target's keys and values, the drafter's, and the
    features it drafts from."""
    kept = _numbers(target.kv_shapes) * target.dtype.itemsize
    if drafter is None:
        return kept
    features = drafter.config.feature_width * target.dtype.itemsize
    return kept + features + _numbers(drafter.kv_shapes) * drafter.norm.weight.element_size()


def _numbers(shapes: Sequence[HeadShape]) -> int:
    """Numbers in keys and values of one token, in all layers."""
    return sum(shape.heads * (shape.key_size + shape.value_size) for shape in shapes)


def default_max_batch(
    target: BaseTarget, drafter: Drafter | None, wanted: int | None = None
) -> int:
    """Requests decoded together, where no number is given: at most 8 on a CPU, 64 on a GPU.

    A CPU is busy with a few rows, so more requests only slow each other down. A GPU reads the
    weights once for all rows, so many requests cost little more than one. There are fewer, but at
    least one, where the KV cache (`wanted` tokens, or what fits into free memory) would leave each
    less than 512 tokens: requests that run out of cache are started again.
    """
    device = target.device
    room = int(SHARE[device.type] * free_memory(device) / token_bytes(target, drafter))
    each = min(MIN_TOKENS, target.max_context)
    fitting = (wanted or room) // each
    return max(1, min(MAX_BATCH[device.type], fitting))


def kv_tokens(target: BaseTarget, drafter: Drafter | None, useful: int, wanted: int | None) -> int:
    """Tokens of KV cache: as `wanted`, else `useful` or as many as fit.

    Raises InputError when they do not fit.
    """
    share = SHARE[target.device.type]
    each = token_bytes(target, drafter)
    free = free_memory(target.device)
    room = int(share * free / each)
    if wanted is not None and wanted > room:
        allowed = f"{share:.0%} of the free memory is {share * free / 2**30:.1f} GiB"
        why = f"needs {wanted * each / 2**30:.1f} GiB, {allowed}"
        raise InputError(why, field="kv_tokens", value=wanted, fix=f"give at most {room}")
    if room < 256:
        why = f"{free / 2**30:.1f} GiB of memory is free next to the model"
        why += f", a token of KV cache takes {each / 2**20:.2f} MiB"
        raise InputError(why, fix="use a smaller dtype or target, or free memory")
    return wanted or min(room, useful)
