"""How a head is trained: the settings of a run."""

from dataclasses import dataclass
from pathlib import Path

from peagle.errors import InputError
from peagle.train.loss import LossName

# Settings that a run is continued with; the others may change on the way.
LASTING = ("batch", "pack", "ratio", "floor", "decay", "loss", "seed")


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """How a head is trained.

    output: Folder to write checkpoints/, head/, best/ and metrics.jsonl to.
    batch: Sequences per optimizer step, over all processes.
    pack: Pack documents into sequences of this many tokens. Default: one document each.
    segments: Number of passes that a sequence is partitioned into, or auto, which chooses by free
        memory. Default: auto.
    shard: Shard the target and the head over the processes of torchrun (FSDP2).
    recompute: Compute activations again in the backward pass (gradient checkpointing): less memory,
        more time.
    compile: Compile the head's layers with torch.compile. Default: on CUDA only.
    steps: Number of optimizer steps. Default: by `epochs` or `max_train_tokens`.
    epochs: Number of passes over the training data.
    max_train_tokens: Number of answer tokens to train on. Default: by `epochs`.
    lr: Peak learning rate of AdamW, after the warm-up; then it falls linearly to 0.
    warmup: Fraction of the steps in which the learning rate rises linearly (0 to below 1).
    ratio: Fraction of the training positions that each further depth keeps (COD r; 0 to 1).
    floor: Least fraction of the training positions that a depth keeps (COD r_min; 0 to 1).
    decay: Weight of a depth's elements in the loss, for each of the depth before (0 to 1).
    loss: Loss function: kl (divergence from the target's distribution) or cross-entropy.
    seed: Seed of the initial weights, data order and sampling.
    save_every: Steps between checkpoints.
    keep: Number of checkpoints to keep, the newest.
    eval_every: Steps between measurements of the acceptance length.
    patience: Stop early after this many measurements without a better acceptance length. Default:
        never.
    tracker: Experiment tracker to log to besides metrics.jsonl: tensorboard, wandb, ... Default:
        none.
    """

    output: Path
    batch: int = 1
    pack: int | None = None
    segments: int | None = None
    shard: bool = False
    recompute: bool = False
    compile: bool | None = None
    steps: int | None = None
    epochs: int = 1
    max_train_tokens: int | None = None
    lr: float = 6e-4
    warmup: float = 0.01
    ratio: float = 0.5
    floor: float = 0.0
    decay: float = 0.5
    loss: LossName = "kl"
    seed: int = 0
    save_every: int = 200
    keep: int = 2
    eval_every: int = 500
    patience: int | None = None
    tracker: str | None = None

    def __post_init__(self) -> None:
        for name in ("batch", "epochs", "save_every", "keep", "eval_every"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} {getattr(self, name)}: must be at least 1")
        if self.loss not in ("kl", "cross-entropy"):
            raise InputError(f"loss {self.loss!r}: choose kl or cross-entropy")
        for name in ("pack", "segments", "steps", "max_train_tokens", "lr", "patience"):
            if (value := getattr(self, name)) is not None and value <= 0:
                raise InputError(f"{name} {value}: must be above 0")
        if not 0 < self.ratio <= 1 or not 0 <= self.floor <= 1:
            raise InputError(f"ratio {self.ratio}, floor {self.floor}: must lie between 0 and 1")
        if not 0 < self.decay <= 1:
            raise InputError(f"decay {self.decay}: must be above 0 and at most 1")
        if not 0 <= self.warmup < 1:
            raise InputError(f"warmup {self.warmup}: must be at least 0 and below 1")
