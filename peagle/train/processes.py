"""The processes of a training run: their tracker, the parts of weights that each holds, and the
memory that each keeps when it frees it.

FSDP2 spreads the drafter's weights, gradients and moments, and the target's weights, in equal parts
over the processes of a node. Every node has all parts (HSDP): only gradients cross the network.
Weights are gathered just before they are used and given up after; every backward sums gradients
into the parts. So each pass is a collective operation: all processes must make equally many, in the
same order (`pad_passes`). Outside of passes a weight is a DTensor: `gather` returns all of it, and
`shard_like` is its inverse.
"""

import ctypes
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from peagle.errors import InputError
from peagle.methods.base import Elements
from peagle.methods.registry import method_of
from peagle.model.config import DrafterConfig
from peagle.model.drafter import Drafter
from peagle.train.elements import Segment
from peagle.train.trainee import Trainee

# Values of glibc's M_MMAP_THRESHOLD, M_TRIM_THRESHOLD and M_TOP_PAD, by their numbers.
MALLOPT = {-3: 32 << 20, -1: (1 << 31) - 1, -2: 64 << 20}


def make_accelerator(device: torch.device, output: Path, tracker: str | None) -> Accelerator:
    """The rank of this process among those of torchrun or accelerate launch, and its tracker.

    Raises InputError for a tracker that accelerate does not know, or that is not installed.
    """
    if device.type == "cuda" and device.index is not None:  # accelerate takes the current one
        torch.cuda.set_device(device)
    try:
        made = Accelerator(cpu=device.type == "cpu", log_with=tracker, project_dir=str(output))
    except ValueError as error:
        why = "is not supported by accelerate"
        raise InputError(why, field="tracker", value=tracker) from error
    if tracker is not None and not made.log_with:  # accelerate leaves out what is not installed
        fix = f"pip install {tracker}"
        raise InputError("is not installed", field="tracker", value=tracker, fix=fix)
    made.init_trackers("tracker")
    return made


def numbers(metrics: dict[str, Any]) -> dict[str, float]:
    """A number a name, as trackers want them: lists by depth."""
    flat: dict[str, float] = {}
    for name, value in metrics.items():
        if isinstance(value, list):
            flat |= {f"{name}/{depth}": number for depth, number in enumerate(value)}
        elif name != "step":
            flat[name] = value
    return flat


def keep_freed_memory() -> None:
    """Have this process keep up to 2 GiB that it frees for what it allocates next. It would go back
    to the system, and new pages take longer than most of what training does with them. Only glibc
    can do it: elsewhere nothing changes."""
    mallopt: Any = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for name, value in MALLOPT.items():
            mallopt(name, value)


def shard(trainee: Trainee, device: torch.device) -> Any:
    """The same module, its drafter and target spread over the processes of each node, each holding
    its parts on its `device`."""
    nodes = int(os.environ.get("GROUP_WORLD_SIZE", "1"))  # set by torchrun
    shape = (nodes, dist.get_world_size() // nodes)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
    target = trainee.target
    # `target.forward` gathers layer by layer: all processes call it together. Embedding and head
    # stay whole, so that each process may call `target.logits` at any time.
    for part in target.layers:
        fully_shard(part, mesh=mesh)
    whole: set[nn.Parameter] = {target.embedding}  # type: ignore[arg-type]
    fully_shard(target.decoder, mesh=mesh, reshard_after_forward=True, ignored_params=whole)
    target.model.to(device)
    target.device = device
    drafter = trainee.drafter
    drafter.share_embedding(target.embedding)
    if method_of(drafter.config).parallel:  # else layers run once a depth: as often as differs
        for layer in drafter.layers:
            fully_shard(layer, mesh=mesh)
        register_fsdp_forward_method(drafter.layers[0], "fuse")
    return fully_shard(trainee, mesh=mesh)


def pad_passes(passes: list[list[Segment]], device: torch.device) -> None:
    """Add idle passes until all processes make equally many for their first, second, … sequence."""
    counts = torch.tensor([len(made) for made in passes], device=device)
    dist.all_reduce(counts, dist.ReduceOp.MAX)
    for made, count in zip(passes, counts.tolist(), strict=True):
        made.extend([idle_pass(device)] * (count - len(made)))


def idle_pass(device: torch.device) -> Segment:
    """One that trains nothing, for a process that has fewer."""
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    return Segment(Elements(zero, zero), zero.bool())


def gather(tensor: Tensor) -> Tensor:
    """All of a tensor; on the CPU when it had to be gathered, which all processes do together."""
    return tensor.full_tensor().cpu() if isinstance(tensor, DTensor) else tensor


def shard_like(tensor: Tensor, like: Tensor) -> Tensor:
    """The whole `tensor` as `like` is laid out, on its device."""
    tensor = tensor.to(like.device)
    if not isinstance(like, DTensor):
        return tensor
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)


def rebuilt(drafter: Drafter, config: DrafterConfig, state: dict[str, Tensor]) -> Drafter:
    """A drafter of another config, which may ask for more weights or fewer, with the weights of
    `state`, whole."""
    made = method_of(config).build(config).to(drafter.norm.weight)  # its device and dtype
    made.load_state_dict({name: gather(t) for name, t in state.items()}, strict=False)
    if drafter.shared_embedding is not None:
        made.share_embedding(drafter.shared_embedding)
    return made
