"""`peagle data capture`: what training needs of the target, made once."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from peagle.cli import common
from peagle.cli.options import Fields
from peagle.data.dataset import read_examples
from peagle.errors import InputError, check_at_least
from peagle.files import writing
from peagle.train.capture import CaptureConfig, in_process, plan_capture, size_text
from peagle.train.capture import capture as run_capture
from peagle.vllm.capture import Vllm, through_vllm, tokens_in_passing
from peagle.vllm.process import VllmFailed, look

KEPT = "earlier shards are complete: run the same command to continue"


def capture(
    target: str,
    *,
    data: Path,
    config: Annotated[CaptureConfig, Fields("output", "feature_layers", "max_length")],
    chat_template: str | None = None,
    strict: bool = False,
    shard_mb: float = 512,
    part: str = "1/1",
    device: str = "auto",
    engine: Literal["transformers", "vllm"] = "transformers",
    tensor_parallel_size: int = 1,
    vllm_python: common.VllmPythonOption = None,
) -> None:
    """Run the target over a data file once; `train --data FOLDER` reuses its features.

    data: JSONL file of answers or conversations, plain or .gz.
    shard_mb: Size of one shard file in megabytes.
    part: Part to capture, as i/n: parts 1/n to n/n, made by any processes and machines in one
        folder or in several, are the whole.
    engine: Engine that runs the target: transformers or vllm.
    tensor_parallel_size: Number of GPUs that vLLM splits the target over.
    """
    common.existing_file(data, "data")
    output = config.output
    common.check_folder(output)
    check_at_least(1, tensor_parallel_size=tensor_parallel_size)
    check_at_least(4, max_length=config.max_length)
    if not 1e-6 <= shard_mb <= 1e6:
        raise InputError("must be 0.000001 to 1000000", field="shard_mb", value=shard_mb)
    config = replace(config, shard_bytes=int(shard_mb * 1e6), part=_part(part))
    vllm = _vllm(engine, vllm_python, tensor_parallel_size, device)
    how: dict[str, Any] = {"unrun": 1} if vllm else {"device": device}
    loaded = common.open_target(target, chat_template, **how)
    assert loaded.tokenizer is not None
    # vLLM samples one token more, and beyond the context it takes LongRoPE's long factors.
    longest = min(config.max_length, loaded.max_context - 1)
    examples = read_examples(data, loaded.tokenizer, longest, strict=strict)
    passing = tokens_in_passing([len(e.ids) for e in examples]) if vllm else 0
    plan = plan_capture(loaded, examples, config, passing=passing)
    tapped = plan.origin.feature_layers
    run = in_process(loaded, tapped)
    if vllm:
        run = through_vllm(vllm, loaded, tapped, output, config.part[0])
    there = sum(len(plan.shards[number]) for number in plan.done)
    size = f"{plan.tokens} tokens: {size_text(plan.bytes)} on disk"
    if there:
        size += f", {there} documents are there: {size_text(plan.bytes_left)} to write"
    share = f" of {len(examples)}" if plan.documents < len(examples) else ""
    common.screen.print(f"{plan.documents}{share} documents, {size}")
    with common.progress_bar("documents", KEPT) as bar:
        task = bar.add_task("", total=plan.documents, completed=there)
        with writing(output, kept=KEPT), common.failing(VllmFailed, kept=KEPT):
            run_capture(run, examples, output, plan, lambda: bar.advance(task))
    common.screen.print(f"captured to {output}: train with --data {output}")


def _part(text: str) -> tuple[int, int]:
    """ "2/4" → (2, 4)."""
    number, slash, count = text.partition("/")
    if not (slash and number.isdecimal() and count.isdecimal()):
        raise InputError("expected i/n, as 2/4", field="part", value=text)
    return int(number), int(count)


def _vllm(engine: str, python: Path | None, parallel: int, device: str) -> Vllm | None:
    """vLLM, its interpreter and number of GPUs; None for transformers."""
    if engine == "transformers":
        if parallel > 1:
            why = "only vLLM splits a target"
            fix = "set `engine` to vllm"
            raise InputError(why, field="tensor_parallel_size", value=parallel, fix=fix)
        return None
    if device not in ("auto", "cpu"):
        raise InputError("vLLM finds its devices itself", field="device", fix="leave it out")
    vllm = Vllm(python or Path(sys.executable), parallel)
    look(vllm.python)
    return vllm
