"""Configuration of a drafter: sizes, flags, and the target it was trained against."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from peagle.errors import InputError, check_at_least

if TYPE_CHECKING:
    from peagle.model.layer_config import LayerConfig

Embedding = Literal["full", "mask-row", "shared"]


@dataclass(frozen=True, slots=True)
class CorrectionConfig:
    """Sizes of a correction."""

    rank: int = 128
    candidates: int = 32  # tokens of a slot that are scored

    def __post_init__(self) -> None:
        sizes = {"correction.rank": self.rank, "correction.candidates": self.candidates}
        check_at_least(1, **sizes)


@dataclass(frozen=True, slots=True)
class Provenance:
    """The target and the data that a head was trained on; checked when the head is loaded."""

    target: str = ""  # name the user gave
    config_hash: str = ""  # of the target's architecture (model/fingerprints.py)
    weights_hash: str = ""  # of a few of the target's weights
    template_hash: str = ""  # of its chat template
    # What it was trained on, however config.json is edited later; empty for older heads.
    feature_layers: list[int] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)  # answer tokens, steps, sources
    acceptance: dict[str, Any] = field(default_factory=dict)  # measured AL by data set and K


@dataclass(frozen=True, slots=True)
class DrafterConfig:
    """The drafter's computation (DESIGN of the checkpoints: vLLM's llama_eagle3.py)."""

    method: str  # a name in methods/registry.py
    transformer: "LayerConfig"  # sizes, RoPE, eps, biases
    feature_layers: tuple[int, ...]  # see `Target.forward`: the residual stream entering these
    draft_vocab_size: int
    target_hidden_size: int
    mask_token_id: int | None = None  # placeholder token; None: nothing is masked
    depths: int | None = None  # K it was trained for; None: unknown
    embedding: Embedding = "full"  # own table | target's, but for the mask's row | target's
    norm_before_residual: bool = False  # layer 0's residual is the feature after hidden_norm
    norm_before_fc: bool = False  # one RMSNorm over the concatenated features
    fc_norm: bool = False  # one RMSNorm per feature
    norm_output: bool = False  # what is fed back is the hidden state after the final norm
    logit_scale: float = 1.0
    correction: CorrectionConfig | None = None  # of a parallel head
    provenance: Provenance = Provenance()

    def __post_init__(self) -> None:
        layers = self.feature_layers
        if not layers or list(layers) != sorted(set(layers)):
            fix = "name them in ascending order (a target of fewer than 7 layers has no defaults)"
            why = "must be strictly ascending"
            raise InputError(why, field="feature_layers", value=list(layers), fix=fix)
        if self.norm_before_fc and self.fc_norm:
            raise InputError("excludes `fc_norm`", field="norm_before_fc", fix="set one of them")
        if self.embedding == "mask-row" and self.mask_token_id is None:
            raise self._bad_embedding("needs a mask token")
        sizes = f"hidden size {self.target_hidden_size}, the head {self.transformer.hidden_size}"
        if self.embedding != "full" and self.target_hidden_size != self.transformer.hidden_size:
            raise self._bad_embedding(f"the target's has {sizes}")

    def _bad_embedding(self, why: str) -> InputError:
        return InputError(why, field="embedding", value=self.embedding, fix="choose 'full'")

    @property
    def feature_width(self) -> int:
        """F·E: numbers in the target's features of a token."""
        return len(self.feature_layers) * self.target_hidden_size


def default_feature_layers(num_layers: int) -> tuple[int, ...]:
    """vLLM's default for EAGLE-3: (2, n//2, n−3). Below 7 layers they collide and are refused."""
    return (2, num_layers // 2, num_layers - 3)
