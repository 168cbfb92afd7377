"""Sampling parameters mean what they mean in vLLM: greedy tokens and log-probabilities are equal.

Ours decode with the shipped head, vLLM's without: what a row is made of must not depend on drafts.
"""

import json
import subprocess
from pathlib import Path

import pytest

from peagle.data.chat import prompt_ids
from peagle.engine.llm import LLM
from peagle.engine.params import SamplingParams
from peagle.heads.find import find_head
from peagle.model.loader import locate
from peagle.vllm.capture import ENVIRONMENT
from peagle.vllm.process import environment

pytestmark = pytest.mark.vllm

TARGET = "smollm2-135m"
QUESTIONS = ("Name three colours, again and again.", "Write a JSON object about a cat.")
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
CASES = [
    {"repetition_penalty": 1.3},
    {"presence_penalty": 0.9, "frequency_penalty": 0.6},
    {"logit_bias": {28: 5.0, 198: -100.0}, "frequency_penalty": -0.4, "repetition_penalty": 0.9},
    {"logprobs": 3, "repetition_penalty": 1.1},
    {"stop_token_ids": [30, 28, 198]},
    {"json_schema": SCHEMA, "presence_penalty": 0.3},
    {"regex": "[A-Z][a-z]{3,9}( [a-z]{2,7}){4}\\.", "logit_bias": {260: 4.0}},
]
MAX_TOKENS = 48
SCRIPT = """
import json, sys
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.sampling_params import StructuredOutputsParams

asked = json.load(open(sys.argv[1]))
llm = LLM(asked["target"], dtype="float32", max_model_len=512, enforce_eager=True,
          structured_outputs_config={"backend": "guidance"}, seed=0)
answers = []
for case in asked["cases"]:
    form = {"json": case.pop("json_schema", None), "regex": case.pop("regex", None)}
    form = {kind: value for kind, value in form.items() if value is not None}
    if "logit_bias" in case:
        case["logit_bias"] = {int(token): bias for token, bias in case["logit_bias"].items()}
    if form:
        case["structured_outputs"] = StructuredOutputsParams(**form)
    params = SamplingParams(temperature=0, max_tokens=asked["max_tokens"], **case)
    prompts = [TokensPrompt(prompt_token_ids=ids) for ids in asked["prompts"]]
    for answer in llm.generate(prompts, params, use_tqdm=False):
        out = answer.outputs[0]
        logprobs = [[at[t].logprob, sorted((v.logprob for v in at.values()), reverse=True)[:3]]
                    for t, at in zip(out.token_ids, out.logprobs or [])]
        answers.append([list(out.token_ids), out.text, out.finish_reason, logprobs])
json.dump(answers, open(sys.argv[2], "w"))
"""


def test_parameters_mean_the_same(tmp_path: Path, vllm_python: str) -> None:
    head = find_head(TARGET, method="p-eagle")
    assert head is not None
    llm = LLM(TARGET, head=head.folder, k=3, dtype="float32")
    prompts = [prompt_ids(llm.tokenizer, [{"role": "user", "content": q}]) for q in QUESTIONS]
    asked, answered = tmp_path / "asked.json", tmp_path / "answered.json"
    question = {"target": locate(TARGET)[0], "cases": CASES, "max_tokens": MAX_TOKENS}
    asked.write_text(json.dumps(question | {"prompts": prompts}))
    command = [vllm_python, "-c", SCRIPT, str(asked), str(answered)]
    environ = environment({**ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"})
    run = subprocess.run(
        command, capture_output=True, text=True, timeout=1200, check=False, env=environ
    )
    assert run.returncode == 0, f"vLLM failed:\n{run.stderr[-4000:]}"
    theirs = iter(json.loads(answered.read_text()))
    accepted = 0
    for case in CASES:
        for ours in llm.generate(prompts, SamplingParams(max_tokens=MAX_TOKENS, **case)):
            tokens, text, reason, logprobs = next(theirs)
            assert (ours.token_ids, ours.text, ours.finish_reason) == (tokens, text, reason), case
            accepted += sum(ours.drafted)
            for entry, (own, top) in zip(ours.logprobs or [], logprobs, strict=True):
                assert entry.logprob == pytest.approx(own, abs=1e-3)
                assert [value for _, value in entry.top] == pytest.approx(top, abs=1e-3)
    assert accepted > 50
