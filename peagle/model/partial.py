"""Targets without their layers: for plans, and for what reads embedding, last norm and output head
only, such as an export and training from captured features.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from peagle.model.describe import read_weights
from peagle.model.described import below
from peagle.model.fingerprints import outer_norms
from peagle.model.loader import load_target, read_tokenizer, reading, resolve_device, target_folder
from peagle.model.target import Target

UNCHANGED = (None, "mxfp4")  # quantisations that leave all weights but those of experts as they are


def outline(name: str) -> Target:
    """Build the target without its weights. Raises InputError as `load_target` does."""
    folder = target_folder(name, ())
    with reading(name):
        config = AutoConfig.from_pretrained(folder)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=config.dtype or torch.bfloat16)
        if config.get_text_config()._experts_implementation != "eager":
            model.set_experts_implementation("batched_mm")  # grouped_mm has no outline in float32
    return Target(model.eval(), None, name)


class PartialTarget(Target):
    """The embedding, last norm and output head of a target. Its layers cannot run; weights of some
    are mapped, and read when they are asked for."""

    runs = False

    def __init__(self, made: Target, weights: Mapping[str, Tensor], device: str) -> None:
        """`made`: an outline, which becomes this target. `weights`: by their names in it."""
        self.__dict__ |= made.__dict__
        self._mapped = weights
        self._prefix = _layers_prefix(made)
        self.device = torch.device(device)
        ends = {name: weights[name].to(device, made.dtype) for name in _ends(made)}
        made.model.load_state_dict(ends, strict=False, assign=True)
        made.model.tie_weights()
        for module in [*made.model.modules()]:  # nothing without weights can be moved or sharded
            module._buffers.clear()
            for child_name, child in module.named_children():
                if all(p.is_meta for p in child.parameters()):
                    setattr(module, child_name, nn.Identity())
        self.layers = nn.ModuleList()

    def layer_weights(self, layer: int) -> Mapping[str, Tensor]:
        """See `BaseTarget.layer_weights`."""
        return below(self._mapped, f"{self._prefix}{layer}.")

    layer_state = layer_weights


def load_partial(name: str, *, layers: int = 1, device: str = "cpu") -> Target:
    """Load a `PartialTarget` with the weights of its last layers, from those of its files alone
    that have them. Where these name or pack them as its model does not, or have an output head that
    is not the embedding though the config says so, load the whole target.

    Raises InputError as `load_target` does.
    """
    made = outline(name)
    prefix = _layers_prefix(made)
    norms = {f"{prefix}{n}.{key}": p for n, key, p in outer_norms(made)}
    needed = _ends(made) | norms
    last = [f"{prefix}{n}." for n in range(made.num_layers)[-layers:]]
    tied = made.model.all_tied_weights_keys  # what each name is tied to
    wanted = (*needed, *tied, *last)
    folder = target_folder(name, wanted)
    with reading(name):
        weights = read_weights(folder, wanted)
    packing = getattr(made.model.config, "quantization_config", {}).get("quant_method")
    alike = [each in weights and weights[each].shape == p.shape for each, p in needed.items()]
    equal = (torch.equal(weights[n], weights[tied[n]]) for n in tied.keys() & weights.keys())
    if not all(alike) or not all(equal) or packing not in UNCHANGED:
        return load_target(name, device=device)
    found = PartialTarget(made, weights, resolve_device(device))
    found.tokenizer = read_tokenizer(name, folder)
    return found


def _ends(target: Target) -> dict[str, Tensor]:
    """Embedding, norms outside of the layers and output head of an outline, by their names; tied
    ones once."""
    model = target.model
    norms = [c for c in target.decoder.children() if {p.ndim for p in c.parameters()} == {1}]
    parts = [model.get_input_embeddings(), model.get_output_embeddings(), *norms]
    kept = {p for part in parts for p in part.parameters()}
    return {name: p for name, p in model.named_parameters() if p in kept}


def _layers_prefix(target: Target) -> str:
    return next(n for n, m in target.model.named_modules() if m is target.layers) + "."
