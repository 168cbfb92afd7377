"""Settings of a training run."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from peagle.errors import InputError

# Settings that a resumed run must have, too; the others may change on the way.
RESUME_FIXED = ("batch", "pack", "ratio", "decay", "seed")
# And those of its head, and of the head's layers, that the shapes of the weights do not show.
OF_HEAD = "method depths norm_output norm_before_residual norm_before_fc logit_scale mask_token_id"
OF_LAYERS = "rope_parameters sliding_window num_attention_heads rms_norm_eps hidden_act"
COUNTS = "batch epochs save_every keep eval_every pack segments steps max_train_tokens patience"
RANGES: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    (COUNTS, lambda x: x >= 1, "must be at least 1"),
    ("lr correction_lr", lambda x: x > 0, "must be above 0"),
    ("ratio decay", lambda x: 0 < x <= 1, "must be above 0 and at most 1"),
    ("cooldown", lambda x: 0 <= x <= 1, "must lie between 0 and 1"),
    ("warmup", lambda x: 0 <= x < 1, "must be at least 0 and below 1"),
    ("seed", lambda x: abs(x) < 2**40, "must be less than 2**40 from 0"),
)


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """Settings of a training run.

    Run:
    output: Folder to write checkpoints/, head/, best/ and metrics.jsonl to.
    steps: Number of optimizer steps. Default: by `epochs` or `max_train_tokens`.
    epochs: Number of passes over the training data.
    max_train_tokens: Number of answer tokens to train on. Default: by `epochs`.
    eval_every: Steps between measurements of the acceptance length.
    patience: Stop early after this many measurements without a better acceptance length. Default:
        never.
    save_every: Steps between checkpoints.
    keep: Number of checkpoints to keep, the newest.
    tracker: Experiment tracker to log to besides metrics.jsonl: tensorboard, wandb, ... Default:
        none.
    seed: Seed of the initial weights, data order and sampling.

    Recipe:
    batch: Sequences per optimizer step, over all processes.
    pack: Pack documents into sequences of this many tokens. Default: one document each.
    lr: Peak learning rate of AdamW.
    correction_lr: Peak learning rate of a correction.
    warmup: Fraction of the steps in which the learning rate rises linearly (0 to below 1).
    cooldown: Fraction of the steps in which it falls linearly to 0, at the end (0 to 1).
    ratio: Fraction of the positions that train one draft token which also train the next (above 0
        to 1); a smaller one takes less memory and time.
    decay: Weight of each draft token in the loss, relative to the one before (above 0 to 1).

    Machine:
    segments: Number of passes in which a sequence is trained, or auto, which chooses by free
        memory; more passes take less memory. Default: auto.
    shard: Shard the target and the head over the processes of torchrun (FSDP2).
    recompute: Compute activations again in the backward pass (gradient checkpointing): less memory,
        more time.
    compile: Compile the head's layers with torch.compile. Default: on CUDA only.
    """

    output: Path
    steps: int | None = None
    epochs: int = 1
    max_train_tokens: int | None = None
    eval_every: int = 500
    patience: int | None = None
    save_every: int = 200
    keep: int = 2
    tracker: str | None = None
    seed: int = 0
    batch: int = 1
    pack: int | None = None
    lr: float = 6e-4
    correction_lr: float = 2e-3
    warmup: float = 0.01
    cooldown: float = 0.2
    ratio: float = 0.5
    decay: float = 0.5
    segments: int | None = None
    shard: bool = False
    recompute: bool = False
    compile: bool | None = None

    def __post_init__(self) -> None:
        for names, holds, why in RANGES:
            for name in names.split():
                value = getattr(self, name)
                if value is not None and not holds(value):
                    raise InputError(why, field=name, value=value)
