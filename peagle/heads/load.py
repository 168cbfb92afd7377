"""From a head on disk to a drafter for a target, and the trial of layer ids that are ambiguous.

In vLLM and here id i is what enters layer i. SpecForge counts what leaves layer i, and SGLang adds
one to the ids for that reason; their heads have them in `eagle_config` alone. So have NVIDIA's,
which count as vLLM does. The two ways differ by one layer, and only a trial distinguishes them.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

import torch

from peagle.heads.checks import TABLE, check
from peagle.heads.format import HeadKeys, head_folder, read_head, state_dict_of
from peagle.methods.keys import LAYER_IDS
from peagle.methods.registry import method_of
from peagle.model.attention import CausalAttend
from peagle.model.base_target import BaseTarget
from peagle.model.drafter import Drafter
from peagle.model.loader import load_target

if TYPE_CHECKING:
    from peagle.model.target import Target

log = logging.getLogger(__name__)

TEXT = Path(__file__).with_name("trial.txt")  # questions, an answer and code


def load_drafter(name: str | Path, target: BaseTarget, *, force: bool = False) -> Drafter:
    """Load the head in folder or hub repository `name` (either dialect), checked against `target`,
    in its dtype and on its device. `force` accepts another target of the same shape. Layer ids
    that may be counted in two ways are tried, and the result is logged.

    Raises InputError that names the head and the first of its problems, see `checks.py`.
    """
    files = read_head(head_folder(name))
    config = files.parse(target.num_layers)
    check(files, target, name, force=force)
    if not files.native and config.embedding == "full" and TABLE not in files.tensors:
        config = replace(config, embedding="shared")  # as vLLM does; native heads record it
    drafter = method_of(config).build(config)
    drafter.load_state_dict(state_dict_of(files.tensors, config))
    drafter = drafter.to(target.device, target.dtype).eval()
    drafter.share_embedding(target.embedding)
    if ids := nested_ids(files):
        how = {"dtype": str(target.dtype).removeprefix("torch."), "device": str(target.device)}
        model = target if target.runs else load_target(target.name, **how)
        layers, found = try_both(drafter, cast("Target", model), ids)
        drafter.config = replace(config, feature_layers=layers)
        log.warning("head %s: layers %s: %s", name, list(layers), found)
    return drafter


class Trial(NamedTuple):
    """The layers that a head reads, in vLLM's way of counting, and what was found."""

    layers: tuple[int, ...]
    found: str


def nested_ids(keys: HeadKeys) -> list[int]:
    """The layer ids of a head that may be counted either way: they are in eagle_config alone, and
    config.json does not show which. Empty for any other head."""
    if keys.native or keys.speculators or keys.raw.get(LAYER_IDS):
        return []
    return list(keys.eagle.get(LAYER_IDS) or [])


def try_both(drafter: Drafter, target: "Target", ids: Sequence[int]) -> Trial:
    """Find out whether `ids` are what enters these layers or what leaves them, by the share of its
    first draft tokens that the target accepts."""
    ways = (tuple(ids), tuple(layer + 1 for layer in ids))
    possible = [layers for layers in ways if layers[-1] <= target.num_layers]
    shares = {layers: _accepted(drafter, target, layers) for layers in possible}
    best = max(shares, key=lambda layers: shares[layers])
    each = ", ".join(f"{share:.1%} with {list(layers)}" for layers, share in shares.items())
    found = f"{list(ids)} in eagle_config only, where some count what leaves a layer"
    return Trial(best, f"{found}: of its first draft tokens the target accepts {each}")


@torch.no_grad()
def _accepted(drafter: Drafter, target: "Target", layers: tuple[int, ...]) -> float:
    """Expected share of accepted first draft tokens, over all positions of TEXT."""
    ids: Sequence[int] = range(2, len(target.embedding))
    if target.tokenizer is not None:
        ids = target.tokenizer(TEXT.read_text())["input_ids"]
    tokens = torch.tensor(ids[: target.max_context], device=target.device)
    positions = torch.arange(len(tokens), device=tokens.device)
    out = target.forward(tokens, positions, CausalAttend(), layers)
    features = drafter.project(out.features[:-1])
    normed = drafter(tokens[1:], features, positions[:-1], CausalAttend()).normed
    offered = drafter.logits(normed).float().softmax(-1)
    chosen = target.logits(out.hidden[1:]).float().softmax(-1)[:, drafter.target_ids]
    return float(torch.minimum(offered, chosen).sum(-1).mean())
