"""`peagle demo`: the demo target alone, with EAGLE-3 and with P-EAGLE, side by side."""

from pathlib import Path
from typing import Annotated

import typer

from peagle.bench.run import environment, report, write_json
from peagle.cli.common import ModelOptions, console, print_table, progress_bar, screen
from peagle.cli.options import App, Fields, check_at_least
from peagle.cli.rows import rows_table
from peagle.engine.drafting import Drafting
from peagle.engine.params import SamplingParams
from peagle.files import check_folder

app = App()
TARGET = "smollm2-135m"
COLUMNS = ("method", "nodes", "tok/s", "×", "95 %", "tokens / forward", "per position")


@app.command()
def demo(
    *,
    prompts: int = 8,
    sampling: Annotated[SamplingParams, Fields(max_tokens=128)],
    model: Annotated[ModelOptions, Fields("quantize", dtype="bfloat16")],
    output: Path = Path("results/demo.json"),
) -> None:
    """Decode HumanEval prompts three ways, interleaved, greedy, and compare speed and tokens.

    prompts: HumanEval prompts to answer.
    output: JSON file to write.
    """
    from transformers.utils import logging

    from peagle.bench.native import device_name, side_by_side
    from peagle.bench.workload import human_eval
    from peagle.engine.llm import LLM
    from peagle.heads.find import find_head

    check_at_least(1, prompts=prompts)
    logging.disable_progress_bar()
    ways = [Drafting(method, "auto", lookup=True) for method in ("eagle3", "p-eagle")]
    heads = {way: find_head(TARGET, method=way.method) for way in ways}
    check_folder(output.parent)
    questions = human_eval()[-prompts:]  # each K was chosen on the first ones
    with screen.status(f"loading {TARGET} (the first time it is downloaded and de-quantised)"):
        # The native engine is hardly tried on GPUs, and the demo is for every machine.
        llm = LLM(
            TARGET, max_batch=1, deterministic=True, dtype=model.dtype, quantize=model.quantize,
            device="cpu",
        )  # fmt: skip
        drafters = {way: llm.load_head(head.folder) for way, head in heads.items() if head}
    with progress_bar("answers") as bar:
        task = bar.add_task("", total=len(questions) * (1 + len(drafters)))
        measured = side_by_side(llm, drafters, questions, sampling, lambda: bar.advance(task))
    device = device_name()
    settings = {
        "target": TARGET, "dtype": model.dtype, "quantize": model.quantize, "dataset": "humaneval",
        "max_tokens": sampling.max_tokens, "repeats": len(questions), "engine": "native",
    }  # fmt: skip
    found = report(measured, {**environment(device), "settings": settings})
    write_json(output, found)
    weights = f"{model.dtype}, {model.quantize} weights" if model.quantize else model.dtype
    console.print(f"{TARGET}, {weights}, greedy, {len(questions)} HumanEval prompts, {device}")
    print_table(rows_table(found["rows"], *COLUMNS))
    same = all(row.get("same") in (None, len(questions)) for row in found["rows"])
    console.print(f"token ids identical: {'yes' if same else 'NO'}    written: {output}")
    if not same:
        raise typer.Exit(1)
