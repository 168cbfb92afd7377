"""The target: any decoder of transformers, unmodified, with our attention and feature taps.

A target never changes once it is made, so any number of engines may use one at the same time.

Shapes: T rows (of one or more requests), E target hidden, F feature layers, R rows, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from copy import copy, deepcopy
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from peagle.errors import InputError
from peagle.model.attention import Attend, AttentionSpec, CausalAttend, HeadShape
from peagle.model.base_target import BaseTarget, TargetOutput, listed
from peagle.model.layer_config import FULL, SLIDING

ATTENTION = "peagle"  # the name our attention is registered under


class Step(NamedTuple):
    """One forward: it travels as a keyword argument of the model's own forward."""

    attend: Attend
    taps: dict[int, Any]  # (T, E) by layer, None before it runs; see `Target.forward`


def _attention(  # noqa: PLR0913 (the interface of transformers)
    module: nn.Module,
    query: Tensor,  # (1, N, T, H)
    key: Tensor,  # (1, M, T, H)
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    peagle_step: Step,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,  # dropout and flags of other attention kernels
) -> tuple[Tensor, None]:
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    spec = AttentionSpec(scaling, sliding_window, softcap, s_aux)
    return peagle_step.attend(cast(int, module.layer_idx), q, k, v, spec)[None], None


class _States(tuple[Tensor]):
    """A decoder's output of hidden states alone: router logits and the like are absent."""

    def __getattr__(self, name: str) -> Tensor | None:
        return self[0] if name == "last_hidden_state" else None


class _Passthrough(nn.Module):
    """Replaces the decoder, so that the model's own head (caps, scales) runs on states."""

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> _States:
        return _States([inputs_embeds])


class Target(BaseTarget):
    """A model of transformers. Inference only: no gradient ever flows into it."""

    runs = True

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, name: str
    ) -> None:
        """`model` must be a causal LM in eval mode. Raises InputError for models whose token mixers
        do not all go through the attention interface."""
        self.config = model.config.get_text_config()
        _refuse_foreign_mixers(model, self.config, name)
        ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attention)
        model.set_attn_implementation(ATTENTION)
        self.name = name
        self.tokenizer = tokenizer
        self.device = model.device
        self.dtype = model.dtype
        self.model = model.requires_grad_(False).eval()
        self.decoder = model.get_decoder()
        _fix_rope(self.decoder)
        self.layers = _decoder_layers(self.decoder, self.config.num_hidden_layers)
        self.head = _head_only(self.model, self.decoder)
        for index, layer in enumerate(self.layers):
            layer.register_forward_pre_hook(_tap(index), with_kwargs=True)
        self.layers[-1].register_forward_hook(_tap(len(self.layers)), with_kwargs=True)
        probed = self._probe()
        self.kv_shapes = [shape for shape, _ in probed]
        self.window = max(spec.window or self.max_context for _, spec in probed)
        self.end_ids = listed(getattr(model.generation_config, "eos_token_id", None))

    @property
    def embedding(self) -> Tensor:
        """See `BaseTarget.embedding`."""
        return self.model.get_input_embeddings().weight

    def layer_weights(self, layer: int) -> Mapping[str, Tensor]:
        """See `BaseTarget.layer_weights`."""
        return dict(self.layers[layer].named_parameters())

    def layer_state(self, layer: int) -> Mapping[str, Tensor]:
        """`layer_weights`, and those that are packed, as they were before."""
        return self.layers[layer].state_dict()

    def copy(self) -> "Target":
        """A target of the same weights, whose modules can be replaced without changing this one."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        model = deepcopy(self.model, {id(tensor): tensor for tensor in tensors})
        return Target(model, self.tokenizer, self.name)  # hooks twice: they note the same

    def exact(self) -> "Target":
        """A target of the same weights whose experts compute a row at a time. Each expert sees a
        number of rows of its own, so a row's result would depend on the other rows."""
        found = self.copy()
        if self.config._experts_implementation != "eager":
            found.model.set_experts_implementation("batched_mm")
        return found

    @torch.no_grad()
    def forward(
        self, ids: Tensor, positions: Tensor, attend: Attend, taps: Sequence[int] = ()
    ) -> TargetOutput:
        """Run tokens `ids` (T,) at `positions` (T,); `attend` holds the keys and the mask. The
        features are what enters the layers `taps`, side by side; one more than the last layer is
        what leaves that, before the final norm (as in vLLM)."""
        step = Step(attend, dict.fromkeys(taps))
        out = self.decoder(
            input_ids=ids[None], position_ids=positions[None], use_cache=False, peagle_step=step
        )
        hidden = out.last_hidden_state[0]
        return TargetOutput(hidden, torch.cat([hidden[:, :0], *step.taps.values()], dim=-1))

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """(R, E) → (R, V) through the model's own head."""
        return cast(Tensor, self.head(inputs_embeds=hidden[None], use_cache=False).logits)[0]

    def _probe(self) -> list[tuple[HeadShape, AttentionSpec]]:
        """Every layer's shape of keys and values and its attention, by one token through the model
        and its head. Raises InputError when a layer did not ask us to attend."""
        causal = CausalAttend()
        found = dict[int, tuple[HeadShape, AttentionSpec]]()

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
            found[layer] = HeadShape(k.shape[1], k.shape[2], v.shape[2]), spec
            return causal(layer, q, k, v, spec)

        zero = torch.zeros(1, dtype=torch.int64, device=self.device)
        try:
            self.logits(self.forward(zero, zero, attend).hidden)
        except (TypeError, AttributeError):  # a model that keeps our keyword argument to itself
            found.clear()
        if missing := set(range(len(self.layers))) - set(found):
            why = f"layers {sorted(missing)} without the attention interface"
            raise _unsupported(self.config, self.name, why)
        return [found[layer] for layer in range(len(self.layers))]


def _tap(layer: int) -> Any:
    """A hook that notes what enters a layer, or what leaves the one before (a forward hook's
    `out`), in forwards that ask for it."""

    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *out: Any) -> None:
        step: Step | None = kwargs.get("peagle_step")
        if step is not None and layer in step.taps:
            states = (out or args or (kwargs["hidden_states"],))[0]
            step.taps[layer] = states[0].flatten(0, -2)  # a layer may return a tuple

    return note


def _fix_rope(decoder: Any) -> None:
    """Keep RoPE's frequencies as they are after loading. Those of dynamic RoPE and LongRoPE follow
    the longest request of a forward: a row would depend on the other rows."""
    for module in decoder.modules():
        if kind := getattr(module, "rope_type", None):  # one for all layers, or one for each kind
            each = isinstance(kind, dict)
            module.rope_type = dict.fromkeys(kind, "default") if each else "default"


def _refuse_foreign_mixers(model: PreTrainedModel, config: PretrainedConfig, name: str) -> None:
    foreign = set(getattr(config, "layer_types", None) or ()) - {FULL, SLIDING}
    if foreign or not model._supports_attention_backend:
        why = f"{', '.join(sorted(foreign))} layers" if foreign else "its own attention"
        raise _unsupported(config, name, why)


def _unsupported(config: PretrainedConfig, name: str, why: str) -> InputError:
    fix = "use a decoder whose layers all attend through the interface of transformers"
    return InputError(f"{config.model_type} has {why}", field="target", value=name, fix=fix)


def _decoder_layers(decoder: nn.Module, count: int) -> nn.ModuleList:
    for module in decoder.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise InputError(f"{type(decoder).__name__} has no list of {count} decoder layers")


def _head_only(model: PreTrainedModel, decoder: nn.Module) -> nn.Module:
    """A view of `model` without its decoder (or the multimodal model around it): it shares every
    weight and keeps forward's code."""
    head = copy(model)
    head._modules = {
        name: _Passthrough() if child and decoder in child.modules() else child
        for name, child in model._modules.items()
    }
    return head
