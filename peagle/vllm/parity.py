"""vLLM beside the native engine: one prompt, the same head and K; tokens and acceptance."""

import tempfile
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from peagle.engine.llm import LLM
from peagle.engine.params import SamplingParams
from peagle.engine.request import Stats
from peagle.engine.ties import differences
from peagle.methods.keys import default_k
from peagle.methods.load import rebuilt
from peagle.methods.save import save_drafter
from peagle.methods.validate import Problem, Skipped
from peagle.model.drafter import Drafter
from peagle.model.target import Target
from peagle.vllm.head import Head
from peagle.vllm.llm import start_llm
from peagle.vllm.process import VllmFailed

MAX_TOKENS = 64
SECONDS = 1200  # vLLM compiles kernels when it starts
APART = 0.1  # share of accepted draft tokens that rounding in the drafts explains


def compare_with_vllm(
    python: Path | None, drafter: Drafter, target: Target, prompt: list[int]
) -> str:
    """Describe what both engines output, if it is the same. Raises Problem, or Skipped without an
    interpreter."""
    if python is None:
        raise Skipped("no interpreter named with `vllm_python`")
    # vLLM runs a head without its correction.
    drafter = rebuilt(drafter, replace(drafter.config, correction=None)).eval()
    llm = LLM(target, drafter, k=default_k(drafter.config), max_batch=1)
    [native] = llm.generate([prompt], SamplingParams(max_tokens=MAX_TOKENS))
    token_ids, counted = _ask(python, drafter, target, prompt, llm.k)
    same = _same_tokens(target, prompt, native.token_ids, token_ids)
    lengths = f"{native.stats.acceptance_length:.2f} / {counted.acceptance_length:.2f}"
    accepted = sum(native.stats.accepted)
    apart = abs(accepted - sum(counted.accepted))
    if native.token_ids == token_ids and apart > max(2, APART * accepted):
        raise Problem(
            f"{same}, but acceptance lengths are {lengths}",
            "vLLM drafts otherwise: compare the layer ids, mask token and flags it logs",
        )
    return f"{same}, acceptance {lengths}"


def _same_tokens(target: Target, prompt: list[int], native: list[int], vllm: list[int]) -> str:
    """How many tokens are the same, up to a tie of the target's. Raises Problem at any other."""
    different = differences(target, [prompt], [native], [vllm])
    if not different:
        return f"the same {len(native)} tokens"
    at, gap = different[0].position, f"gap {different[0].gap:.1e}"
    if different[0].tie:
        return f"the same {at} tokens up to a tie of the target ({gap})"
    raise Problem(
        f"vLLM outputs {vllm[at : at + 1]} as token {at}, not {native[at : at + 1]} ({gap})",
        "the target itself differs in vLLM: compare its dtype, RoPE and end tokens",
    )


def _ask(
    python: Path, drafter: Drafter, target: Target, prompt: list[int], k: int
) -> tuple[list[int], Stats]:
    """vLLM's token ids and counters. Raises Problem when it fails."""
    with tempfile.TemporaryDirectory() as name:
        head = Head(Path(name, "head"), drafter.config, k)
        save_drafter(drafter, head.folder, "vllm", dtype=None)
        arguments = {
            "speculative_config": head.speculative(),
            # Near its end vLLM drafts less.
            "max_model_len": min(len(prompt) + MAX_TOKENS + 4 * k, target.max_context),
            "max_num_seqs": 1,
        }
        try:
            with closing(start_llm(python, target, arguments, Path(name, "log"))) as process:
                process.send({"prompts": [prompt], "max_tokens": MAX_TOKENS})
                reply = process.receive(SECONDS)
        except VllmFailed as error:
            raise Problem(str(error), "run it by itself with the exported head") from error
    rounds = int(reply["counters"]["vllm:spec_decode_num_drafts"])
    accepted = reply["counters"]["vllm:spec_decode_num_accepted_tokens_per_pos"]
    return reply["token_ids"][0], Stats(rounds, rounds * k, accepted)
