"""`peagle demo`: the demo target alone, with EAGLE-3 and with P-EAGLE, side by side."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from peagle.bench import summary
from peagle.bench.run import write_json
from peagle.cli.common import ModelOptions, console, progress_bar, screen
from peagle.cli.options import App, Fields
from peagle.engine.drafting import Drafting
from peagle.engine.params import SamplingParams
from peagle.files import check_folder
from peagle.shown import mean_length

app = App()
TARGET = "smollm2-135m"


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
    from peagle.bench.workload import human_eval_prompts
    from peagle.engine.llm import LLM
    from peagle.heads.find import find_head

    logging.disable_progress_bar()
    ways = [Drafting(method, "auto", lookup=True) for method in ("eagle3", "p-eagle")]
    heads = {way: find_head(TARGET, method=way.method) for way in ways}
    check_folder(output.parent)
    questions = human_eval_prompts(prompts)
    with screen.status(f"loading {TARGET} (the first time it is downloaded and de-quantised)"):
        # The native engine is hardly tried on GPUs, and the demo is for every machine.
        llm = LLM(
            TARGET, max_batch=1, deterministic=True, dtype=model.dtype, quantize=model.quantize,
            device="cpu",
        )  # fmt: skip
        drafters = {way: llm.load_head(head.folder) for way, head in heads.items() if head}
    with progress_bar("answers") as bar:
        task = bar.add_task("", total=prompts * (1 + len(drafters)))
        measured = side_by_side(llm, drafters, questions, sampling, lambda: bar.advance(task))
    same = all(summary.same(result, measured[0])["same"] == prompts for result in measured)
    results = [_row(result) for result in measured]
    report = {
        "device": device_name(),
        "target": TARGET,
        "dtype": model.dtype,
        "quantize": model.quantize,
        "prompts": prompts,
        "max_tokens": sampling.max_tokens,
        "identical": same,
        "rows": results,
    }
    write_json(output, report)
    base = results[0]["tokens_per_second"]
    table = Table("method", "nodes", "tok/s", "speed-up", "tokens a target forward",
                  "accepted per position")  # fmt: skip
    for row in results:
        shares = " ".join(f"{share:.2f}" for share in row["accepted_per_position"])
        speed = row["tokens_per_second"]
        nodes = f"{row['nodes']:.1f}" if row["nodes"] else "-"
        table.add_row(row["method"], nodes, f"{speed:.1f}", f"{speed / base:.2f}×",
                      mean_length(row["tokens_per_forward"]), shares)  # fmt: skip
    weights = f"{model.dtype}, {model.quantize} weights" if model.quantize else model.dtype
    console.print(f"{TARGET}, {weights}, greedy, {prompts} HumanEval prompts, {device_name()}")
    console.print(table)
    console.print(f"token ids identical: {'yes' if same else 'NO'}    written: {output}")
    if not same:
        raise typer.Exit(1)


def _row(result: summary.Result) -> dict[str, Any]:
    """The row as the JSON file has it."""
    return {
        **result.cell.drafting.row,
        "tokens_per_second": round(result.tokens / result.seconds, 2),
        **summary.acceptance_row(result.stats),
        "output_tokens": result.tokens,
        "seconds": round(result.seconds, 3),
    }
