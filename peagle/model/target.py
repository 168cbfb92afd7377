"""The target: any transformers decoder, unmodified, with our attention, KV and feature taps.

Shapes: T packed tokens (of one or more requests), E target hidden, F feature layers, R rows,
V vocabulary.
"""

import hashlib
import json
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from peagle.config import InputError
from peagle.model import native
from peagle.model.attend import ROW_TILE, Attend, AttentionSpec, CausalAttend
from peagle.model.layers import Rotation
from peagle.model.lean import lean, run_whole
from peagle.model.lease import Lease
from peagle.model.packed import pack

ATTENTION = "peagle"  # the name our attention is registered under
KNOWN_MIXERS = {"full_attention", "sliding_attention"}


class TargetOutput(NamedTuple):
    """`hidden` (T, E) feeds `Target.logits`; `features` (T, F·E) feeds the drafter."""

    hidden: Tensor
    features: Tensor | None


class Step:
    """Per-forward context; it travels as a keyword argument of the model's own forward."""

    def __init__(self, attend: Attend, tokens: int) -> None:
        self.attend, self.tokens = attend, tokens  # rows behind `tokens` are padding
        self.taps: dict[int, Tensor] = {}
        self.attended: set[int] = set()
        self.rotation: Rotation | None = None  # of all layers

    def paged(self, layers: Sequence[int], like: Tensor) -> native.Paged | None:
        """What layers need that keep and attend by themselves; None when they cannot."""
        paged = getattr(self.attend, "paged", None)
        return paged(layers, like) if paged else None

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        """Attend, for the rows that are no padding."""
        self.attended.add(layer)
        if not (missing := len(q) - self.tokens):
            return self.attend(layer, q, k, v, spec)
        q, k, v = (x[: self.tokens] for x in (q, k, v))
        return F.pad(self.attend(layer, q, k, v, spec), (0, 0, 0, 0, 0, missing))


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
    return peagle_step(cast(int, module.layer_idx), q, k, v, spec)[None], None


class _Passthrough(nn.Module):
    """Stands in for the decoder, so that the model's own head (caps, scales) runs on states."""

    class Output:
        def __init__(self, hidden: Tensor) -> None:
            self.last_hidden_state = hidden

        def __getitem__(self, index: int) -> Tensor:
            return (self.last_hidden_state,)[index]

        def __getattr__(self, name: str) -> None:  # router logits and the like: absent
            return None

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> "_Passthrough.Output":
        return self.Output(inputs_embeds)


class Target:
    """A loaded target model and its tokenizer. Inference only: no gradient ever flows into it."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, name: str
    ) -> None:
        """`model` must be a causal LM in eval mode. Raises InputError for models whose token mixers
        do not all go through the attention interface."""
        self.name, self.tokenizer = name, tokenizer
        self.lease = Lease(name)
        self.config = model.config.get_text_config()
        self.device, self.dtype = model.device, model.dtype
        _refuse_foreign_mixers(model, name)
        ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attention)
        model.set_attn_implementation(ATTENTION)
        self.model = model.requires_grad_(False).eval()
        self.decoder = model.get_decoder()
        self.layers = _decoder_layers(self.decoder, self.config.num_hidden_layers)
        self.renew_head()
        self.row_tile = 1  # rows of a forward are padded to a multiple of this
        self._experts = self.config._experts_implementation
        self._feature_layers: tuple[int, ...] = ()
        self._hooks: list[Any] = []
        self._probe()

    @property
    def embedding(self) -> Tensor:
        """The input embedding table (V, E)."""
        return self.model.get_input_embeddings().weight

    @property
    def max_context(self) -> int:
        """Longest sequence, prompt and output, the target was made for."""
        return int(getattr(self.config, "max_position_embeddings", None) or 1 << 30)

    def exact(self, on: bool) -> None:
        """Compute a row in the same way whatever stands beside it: forwards of one tile of rows,
        and experts, of which each sees a number of rows of its own, a row at a time."""
        self.row_tile = ROW_TILE if on else 1
        experts = "batched_mm" if on and self._experts != "eager" else self._experts
        if self.config._experts_implementation != experts:
            self.model.set_experts_implementation(experts)

    def lean(self) -> "Target":
        """Run Llama's and Qwen3's layers by our own code (model/lean.py); returns itself."""
        lean(self.layers, self.config)
        self._hook()
        return self

    def pack(self) -> "Target":
        """Lay the weights out for inference on a CPU (model/packed.py); returns itself."""
        pack(self.model)
        self.renew_head()
        return self

    def renew_head(self) -> None:
        """See that `logits` uses the output head that the model has now."""
        self._head = _head_only(self.model, self.decoder)

    def check_layers(self, layers: Sequence[int]) -> None:
        """Raises InputError for feature layers that the target does not have."""
        if any(not 0 <= layer < len(self.layers) for layer in layers):
            raise InputError(
                f"feature layers {list(layers)}: {self.name} has layers 0 to {len(self.layers) - 1}"
            )

    def tap(self, layers: Sequence[int]) -> None:
        """Return the residual stream entering these layers as features from now on."""
        self.check_layers(layers)
        if self._feature_layers != tuple(layers):
            self._feature_layers = tuple(layers)
            self._hook()

    def _hook(self) -> None:
        """Note what enters the feature layers, as they are now."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = [
            self.layers[layer].register_forward_pre_hook(_tapper(layer), with_kwargs=True)
            for layer in self._feature_layers
        ]

    @torch.no_grad()
    def forward(self, ids: Tensor, positions: Tensor, attend: Attend) -> TargetOutput:
        """Run packed tokens `ids` (T,) at `positions` (T,); `attend` holds the KV and the mask."""
        return self._forward(ids, positions, Step(attend, len(ids)))

    def _forward(self, ids: Tensor, positions: Tensor, step: Step) -> TargetOutput:
        rows = self._tiled(ids), self._tiled(positions)
        found = run_whole(self.decoder, *rows, step, self._feature_layers)
        if found is None:
            ids_, positions_ = (x[None] for x in rows)
            out = self.decoder(
                input_ids=ids_, position_ids=positions_, use_cache=False, peagle_step=step
            )
            taps = [step.taps[layer] for layer in self._feature_layers]
            hidden = out.last_hidden_state[0]
            found = hidden, torch.cat(taps, dim=-1) if taps else hidden[:, :0]
        hidden, features = (x[: len(ids)] for x in found)
        return TargetOutput(hidden, features if self._feature_layers else None)

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """(R, E) → (R, V) through the model's own head."""
        padded = self._tiled(hidden)
        return self._head(inputs_embeds=padded[None], use_cache=False).logits[0, : len(hidden)]

    def _tiled(self, rows: Tensor) -> Tensor:
        """Rows (T, …), padded with zeros to whole tiles."""
        missing = -len(rows) % self.row_tile
        return F.pad(rows, (0, 0) * (rows.ndim - 1) + (0, missing)) if missing else rows

    def _probe(self) -> None:
        """One token through the model and its head: every layer must have asked us to attend, with
        keys and values whose bytes are noted."""
        attend, self.kv_bytes = CausalAttend(), 0  # bytes a token of KV cache takes

        def note(layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
            self.kv_bytes += sum(x.numel() * x.element_size() for x in (k, v))
            return attend(layer, q, k, v, spec)

        step = Step(note, 1)
        ids = torch.zeros(1, dtype=torch.int64, device=self.device)
        try:
            with torch.no_grad():
                self.logits(self._forward(ids, ids, step).hidden)
        except (TypeError, AttributeError):  # a model that keeps our keyword argument to itself
            step.attended.clear()
        if missing := set(range(len(self.layers))) - step.attended:
            raise InputError(
                f"target {self.name} ({self.config.model_type}): layers {sorted(missing)} do not "
                "use the attention interface of transformers; such models are not supported"
            )

    @torch.no_grad()
    def last_norm(self) -> nn.Module:
        """What makes `TargetOutput.hidden` of the residual stream that leaves the last layer.

        Found by one token: the part of the decoder that ran last. Raises InputError for decoders
        that do anything else behind their layers.
        """
        left, ran = list[Tensor](), list[tuple[nn.Module, Tensor, Tensor]]()

        def note(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
            ran.append((module, args[0], out) if args else (module, out, out))

        hooks = [part.register_forward_hook(note) for part in self.decoder.children()]
        hooks.append(self.layers[-1].register_forward_hook(lambda _, __, out: left.append(out)))
        try:
            ids = torch.zeros(1, dtype=torch.int64, device=self.device)
            hidden = self._forward(ids, ids, Step(CausalAttend(), 1)).hidden
        finally:
            for hook in hooks:
                hook.remove()
        norm, given, made = ran[-1]
        if given is not left[0] or not torch.equal(made[0, :1], hidden):
            kind = type(self.decoder).__name__
            raise InputError(f"target {self.name} ({kind}): no single norm behind its last layer")
        return norm

    def weights_hash(self) -> str:
        """Fingerprint of a few weights: 64 embedding rows, and the first and last layers' norms."""
        digest = hashlib.sha256()
        parts = [self.embedding[:64]]
        for layer in (self.layers[0], self.layers[-1]):
            parts += [p for name, p in sorted(layer.named_parameters()) if "norm" in name]
        for part in parts:
            rounded = part.detach().to("cpu", torch.bfloat16).contiguous()
            digest.update(rounded.view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()[:16]

    def config_hash(self) -> str:
        """Fingerprint of the architecture: sizes only, whatever the dtype or library version."""
        keys = (
            "hidden_size",
            "model_type",
            "num_attention_heads",
            "num_hidden_layers",
            "vocab_size",
        )
        sizes = {key: getattr(self.config, key, None) for key in keys}
        return hashlib.sha256(json.dumps(sizes, sort_keys=True).encode()).hexdigest()[:16]

    def template_hash(self) -> str:
        """Fingerprint of the chat template, empty when there is none."""
        template = getattr(self.tokenizer, "chat_template", None)
        return hashlib.sha256(str(template).encode()).hexdigest()[:16] if template else ""


def _tapper(layer: int) -> Any:
    def tap(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        kwargs["peagle_step"].taps[layer] = (args[0] if args else kwargs["hidden_states"])[0]

    return tap


def _refuse_foreign_mixers(model: PreTrainedModel, name: str) -> None:
    config = model.config.get_text_config()
    foreign = set(getattr(config, "layer_types", None) or ()) - KNOWN_MIXERS
    if foreign or not model._supports_attention_backend:
        why = f"has {', '.join(sorted(foreign))} layers" if foreign else "has its own attention"
        raise InputError(
            f"target {name} ({config.model_type}) {why}: only decoders whose token mixers all go "
            "through the attention interface of transformers are supported"
        )


def _decoder_layers(decoder: nn.Module, count: int) -> nn.ModuleList:
    for module in decoder.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise InputError(f"{type(decoder).__name__} has no list of {count} decoder layers")


def _head_only(model: PreTrainedModel, decoder: nn.Module) -> nn.Module:
    """A view of `model` without its decoder (or the multimodal model around it): it shares every
    weight and keeps forward's code."""
    head = model.__class__.__new__(model.__class__)
    head.__dict__.update(model.__dict__)
    head._modules = {
        name: _Passthrough() if child and decoder in child.modules() else child
        for name, child in model._modules.items()
    }
    return head
