"""The options of `peagle train`. Those without a value may be in --config, or have a default."""

from pathlib import Path
from typing import Annotated

import typer

DataOption = Annotated[
    str | None,
    typer.Option(
        help="Training data: a JSONL file (plain or .gz), a captured folder, or synth, which has "
        "the target write it. Required here or in --config."
    ),
]
OutputOption = Annotated[
    Path | None,
    typer.Option(
        help="Folder to write checkpoints/, head/ and metrics.jsonl to. Required here or in "
        "--config."
    ),
]
MethodOption = Annotated[
    str | None,
    typer.Option(help="Drafting method to train: p-eagle or eagle3. Default: p-eagle."),
]
LayersOption = Annotated[
    int | None,
    typer.Option(help="Number of decoder layers of the head. Default: 4, or 1 for eagle3."),
]
DepthsOption = Annotated[
    int | None,
    typer.Option(help="Number of draft tokens per round to train for (K). Default: 8."),
]
DraftVocabOption = Annotated[
    int | None,
    typer.Option(help="Size of the draft vocabulary, the most frequent tokens. Default: 8192."),
]
FeatureLayersOption = Annotated[
    str | None,
    typer.Option(
        help="Target layers whose hidden states the head reads, as 2,15,27. Default: those of vLLM."
    ),
]
EmbeddingOption = Annotated[
    str | None,
    typer.Option(
        help="Input embedding of the head: full (its own table), mask-row (the target's, with a "
        "trained row for the mask token) or shared (the target's). Default: mask-row, or shared "
        "for eagle3."
    ),
]
MaxLengthOption = Annotated[
    int | None,
    typer.Option(help="Maximum length of a document in tokens; the rest is cut. Default: 1024."),
]
BatchOption = Annotated[
    int | None,
    typer.Option(help="Sequences per optimizer step, over all processes. Default: 1."),
]
PackOption = Annotated[
    int | None,
    typer.Option(
        help="Pack documents into sequences of this many tokens. Default: one document each."
    ),
]
SegmentsOption = Annotated[
    str | None,
    typer.Option(
        help="Number of passes that a sequence is partitioned into, or auto, which chooses by free "
        "memory. Default: auto."
    ),
]
RecomputeOption = Annotated[
    bool | None,
    typer.Option(
        "--recompute",
        help="Compute activations again in the backward pass (gradient checkpointing): less "
        "memory, more time.",
    ),
]
ShardOption = Annotated[
    bool | None,
    typer.Option(
        "--shard", help="Shard the target and the head over the processes of torchrun (FSDP2)."
    ),
]
StepsOption = Annotated[
    int | None, typer.Option(help="Number of optimizer steps. Default: by --epochs.")
]
EpochsOption = Annotated[
    int | None, typer.Option(help="Number of passes over the training data. Default: 1.")
]
MaxTrainTokensOption = Annotated[
    int | None,
    typer.Option(help="Number of answer tokens to train on. Default: by --epochs."),
]
LearningRateOption = Annotated[
    float | None,
    typer.Option(
        help="Peak learning rate of AdamW, after a linear warm-up over 1 % of the run. Default: "
        "6e-4."
    ),
]
LossOption = Annotated[
    str | None,
    typer.Option(
        help="Loss function: kl (divergence from the target's distribution) or cross-entropy. "
        "Default: kl."
    ),
]
SeedOption = Annotated[
    int | None,
    typer.Option(help="Seed of the initial weights, data order and sampling. Default: 0."),
]
EvalEveryOption = Annotated[
    int | None,
    typer.Option(help="Steps between measurements of the acceptance length. Default: 500."),
]
PatienceOption = Annotated[
    int | None,
    typer.Option(
        help="Stop early after this many measurements without a better acceptance length. Default: "
        "never."
    ),
]
TrackerOption = Annotated[
    str | None,
    typer.Option(
        help="Experiment tracker to log to besides metrics.jsonl: tensorboard, wandb, ... Default: "
        "none."
    ),
]
InitFromOption = Annotated[
    str | None,
    typer.Option(
        help="Head to start from, a folder or hub id. Default: a new head made from the target's "
        "layers."
    ),
]
ResumeOption = Annotated[
    bool,
    typer.Option("--resume", help="Continue exactly from the last checkpoint in --output."),
]
ConfigOption = Annotated[
    Path | None,
    typer.Option(help="YAML file with settings of the same names; options take precedence."),
]
OverridesArgument = Annotated[
    list[str] | None,
    typer.Argument(help="Settings as name=value, which take precedence over --config."),
]
