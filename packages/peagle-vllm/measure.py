"""The plugin peagle-vllm on a CPU: the demo's P-EAGLE head in vLLM, with and without it.

    python packages/peagle-vllm/measure.py --vllm-python .venv-vllm/bin/python

Four processes of vLLM with the same exported head and K: two load the plugin, two do not, so that
the head drafts without its correction. Two of them set `use_local_argmax_reduction` ("top"): the
drafter then chooses its tokens itself, and makes no logits of all tokens. HumanEval prompts with
the chat template, one at a time, greedy, EOS ignored; the processes take turns within a repeat, in
rotating order. A ratio is the median of the ratios within the repeats. `same` counts equal answers.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from common import (  # noqa: E402
    RESULTS,
    TARGET,
    as_ids,
    catalog_k,
    environment,
    fingerprint,
    heads,
    human_eval,
    load,
    options,
    write_json,
)
from engines import WARM_TOKENS, Row, measure  # noqa: E402
from peers import CONTEXT, vllm_peer  # noqa: E402

from peagle.heads.load import load_drafter  # noqa: E402
from peagle.heads.save import save_drafter  # noqa: E402
from peagle.model.loader import locate  # noqa: E402
from peagle.vllm.flags import speculative_config  # noqa: E402

WAYS = {  # the plugin, use_local_argmax_reduction
    "plain": ("", False),
    "plain, top": ("", True),
    "corrected": ("peagle", False),
    "corrected, top": ("peagle", True),
}


def run(args: Any, folder: Path) -> dict[str, Any]:
    """The report; `folder` takes the exported head."""
    llm, head = load("bfloat16"), heads(args)["p-eagle"]
    questions = human_eval()
    prompts = as_ids(llm, questions[: args.prompts])
    warm_up = list(llm.tokenizer(questions[-1])["input_ids"])
    save_drafter(load_drafter(head, llm.target), folder / "head", "vllm")
    start = {
        "model": locate(TARGET)[0],
        "dtype": "bfloat16",
        "max_num_seqs": 1,
        "max_model_len": CONTEXT,
        "enforce_eager": True,  # compiling takes minutes, and is the same for all
    }
    drafting = speculative_config(True, str(folder / "head"), args.k)
    rows, versions = list[Row](), dict[str, str]()
    for name, (plugin, top) in WAYS.items():
        peer = vllm_peer(args.vllm_python, args.threads, plugin)
        drafts = {**drafting, "use_local_argmax_reduction": top}
        request = {"start": {**start, "speculative_config": drafts}, "ignore_eos": True}
        answer = peer.ask({**request, "prompts": [warm_up], "max_tokens": WARM_TOKENS})
        versions = answer["versions"]
        rows.append(Row("vllm", name, args.k, "bf16", 1, peer.decoder(request)))
    measure(rows, prompts, args.max_tokens, args.repeats)
    settings = {
        "target": TARGET,
        "head": fingerprint(head),
        "dataset": "HumanEval",
        "prompts": args.prompts,
        "max_tokens": args.max_tokens,
        "repeats": args.repeats,
        "threads": args.threads,
        "temperature": 0,
        "enforce_eager": True,
        "vllm": versions,
    }
    git = ["git", f"--git-dir={RESULTS.parents[1] / '.git'}", "rev-parse", "HEAD"]
    commit = subprocess.check_output(git, text=True).strip()
    report = {**environment(), "commit": commit, "settings": settings}
    return {**report, "rows": [row.report(rows[0]) for row in rows]}


def main() -> None:
    parser = options(__doc__, "vllm_correction.json")
    parser.add_argument("--vllm-python", default=os.environ.get("PEAGLE_VLLM_PYTHON"),
                        metavar="PYTHON", help="has vLLM and peagle-vllm")  # fmt: skip
    parser.add_argument("--k", type=int, default=catalog_k()["p-eagle"])
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = run(args, Path(folder))
    for row in report["rows"]:
        print(row)
    write_json(args.output, report)


if __name__ == "__main__":
    main()
