"""vLLM beside our engine: one prompt, the same head, K draft tokens; tokens and acceptance."""

import json
import subprocess
import tempfile
from pathlib import Path

import torch

from peagle.engine.llm import LLM
from peagle.engine.params import SamplingParams
from peagle.engine.request import Stats
from peagle.methods.checkpoint import save_drafter
from peagle.methods.keys import UNKNOWN_DEPTHS
from peagle.methods.registry import method_of
from peagle.methods.validate import Problem, Skipped
from peagle.model.attention import CausalAttend
from peagle.model.drafter import Drafter
from peagle.model.loader import locate
from peagle.model.target import Target
from peagle.vllm.process import environment

SCRIPT = Path(__file__).with_name("parity_script.py")
MAX_TOKENS = 64
SECONDS = 1200  # vLLM compiles kernels when it starts
# A smaller gap between the target's two best logits is rounding.
TIE = {torch.float32: 1e-4, torch.float16: 0.03, torch.bfloat16: 0.25}
APART = 0.1  # share of accepted draft tokens that rounding in the drafts explains


def compare_with_vllm(
    python: Path | None, drafter: Drafter, target: Target, prompt: list[int]
) -> str:
    """What both said, when it is the same. Raises Differs, or Skipped without an interpreter."""
    if python is None:
        raise Skipped("no interpreter named with --vllm-python")
    llm = LLM(target, drafter, k=drafter.config.depths or UNKNOWN_DEPTHS, max_batch=1)
    [ours] = llm.generate([prompt], SamplingParams(max_tokens=MAX_TOKENS))
    theirs, counted = _ask(python, drafter, target, prompt, llm.k)
    alike = _alike(target, prompt, ours.token_ids, theirs)
    lengths = f"{ours.stats.acceptance_length:.2f} / {counted.acceptance_length:.2f}"
    apart = abs(sum(ours.stats.accepted) - sum(counted.accepted))
    if ours.token_ids == theirs and apart > max(2, APART * sum(ours.stats.accepted)):
        raise Problem(
            f"{alike}, but acceptance lengths are {lengths}",
            "vLLM drafts otherwise: compare the layer ids, mask token and flags it logs",
        )
    return f"{alike}, acceptance {lengths}"


def _alike(target: Target, prompt: list[int], ours: list[int], theirs: list[int]) -> str:
    """How many tokens both said, up to a tie of the target's. Raises Differs at any other token."""
    both = enumerate(zip(ours, theirs, strict=False))
    at = next((at for at, (a, b) in both if a != b), min(len(ours), len(theirs)))
    if ours == theirs:
        return f"the same {at} tokens"
    ids = torch.tensor(prompt + ours[:at], device=target.device)
    places = torch.arange(len(ids), device=target.device)
    with torch.no_grad():
        hidden = target.forward(ids, places, CausalAttend()).hidden[-1:]
        best = target.logits(hidden)[0].float().topk(2)
    gap, undecided = float(best.values[0] - best.values[1]), set(best.indices.tolist())
    if gap < TIE[target.dtype] and {*ours[at : at + 1], *theirs[at : at + 1]} == undecided:
        return f"the same {at} tokens up to a tie of the target (gap {gap:.1e})"
    raise Problem(
        f"vLLM says {theirs[at : at + 1]} as token {at}, not {ours[at : at + 1]} (gap {gap:.1e})",
        "the target itself differs in vLLM: compare its dtype, RoPE and end tokens",
    )


def _ask(
    python: Path, drafter: Drafter, target: Target, prompt: list[int], k: int
) -> tuple[list[int], Stats]:
    """vLLM's token ids and counters, from a process of its own."""
    path, revision = locate(target.name)
    speculative = {"method": "eagle3", "num_speculative_tokens": k}
    if method_of(drafter.config).parallel:
        speculative["parallel_drafting"] = True
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_drafter(drafter, folder / "head", "vllm", dtype=None)
        llm = {
            "model": path,
            "revision": revision,
            "speculative_config": {**speculative, "model": str(folder / "head")},
            "dtype": str(target.dtype).removeprefix("torch."),
            # Near its end vLLM drafts less.
            "max_model_len": min(len(prompt) + MAX_TOKENS + 4 * k, target.max_context),
            "max_num_seqs": 1,
            "enforce_eager": True,
            "enable_prefix_caching": False,
            "disable_log_stats": False,  # the counters are among them
            "seed": 0,
        }
        request, response = folder / "request.json", folder / "response.json"
        request.write_text(json.dumps({"llm": llm, "prompt": prompt, "max_tokens": MAX_TOKENS}))
        command = [python, SCRIPT, request, response]
        try:
            run = subprocess.run(
                command,
                env=environment(),
                capture_output=True,
                text=True,
                check=False,
                timeout=SECONDS,
            )
        except subprocess.TimeoutExpired as error:
            raise Problem(f"vLLM gave no answer in {SECONDS} s", "run it by itself") from error
        if run.returncode:
            last = (run.stderr.strip().splitlines() or ["no message"])[-1]
            raise Problem(f"vLLM failed: {last}", "run it by itself with the exported head")
        answer = json.loads(response.read_text())
    rounds, accepted = answer["rounds"], answer["accepted"]
    return answer["token_ids"], Stats(rounds, rounds * k, accepted)
