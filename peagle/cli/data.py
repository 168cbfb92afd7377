"""`peagle data`: make training data."""

from pathlib import Path
from typing import Annotated

import typer

from peagle.cli.common import (
    DeviceOption,
    DtypeOption,
    HeadOption,
    MaxTokensOption,
    SeedOption,
    TargetArgument,
    TemperatureOption,
    TopPOption,
    existing_file,
    open_llm,
    progress_bar,
    screen,
)
from peagle.data.regenerate import regenerate as run_regenerate
from peagle.engine.request import SamplingParams

app = typer.Typer(no_args_is_help=True, help="Make training data.")


@app.callback()
def data() -> None:
    """Make training data."""


@app.command()
def regenerate(
    target: TargetArgument,
    prompts: Annotated[
        Path, typer.Option(help='JSONL of {"turns": [...]} or conversations, plain or .gz.')
    ],
    output: Annotated[
        Path, typer.Option(help="JSONL to append answers to; records in it are skipped.")
    ],
    head: HeadOption = None,
    limit: Annotated[int | None, typer.Option(help="First N records only.")] = None,
    temperature: TemperatureOption = 0.0,
    top_p: TopPOption = 1.0,
    seed: SeedOption = 0,
    max_tokens: MaxTokensOption = 512,
    batch: Annotated[int, typer.Option(min=1, help="Prompts answered together.")] = 16,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "cpu",
) -> None:
    """Let the target answer prompts: the text its drafter must learn to predict."""
    existing_file(prompts, "--prompts")
    params = SamplingParams(temperature=temperature, top_p=top_p, seed=seed, max_tokens=max_tokens)
    llm = open_llm(target, head, None, None, dtype=dtype, device=device)
    llm.max_batch = batch
    with progress_bar("answers") as bar:
        task = bar.add_task("", total=None)
        written = run_regenerate(
            llm,
            prompts,
            output,
            params,
            limit,
            lambda done, total: bar.update(task, completed=done, total=total),
        )
    screen.print(f"wrote {written} answers to {output}")
