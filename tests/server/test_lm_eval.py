"""lm-evaluation-harness asks the server, as it asks any other of OpenAI's API."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from serving import MODEL, Running

from peagle.data.chat import prompt_ids
from peagle.engine.llm import LLM
from peagle.engine.params import SamplingParams

pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install '.[eval]'")

TASK = """
task: local
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{max_gen_toks: 12, temperature: 0, until: ["zz"]}}
metric_list:
  - {{metric: exact_match, aggregation: mean, higher_is_better: true}}
"""
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OPENAI_API_KEY": "none"}


@pytest.mark.slow
def test_a_task_of_ones_own(running: Running, llm: LLM, tmp_path: Path) -> None:
    """Half of the wanted answers are what the target says, half are not."""
    questions = [f"the cat sat on mat {i}" for i in range(6)]
    params = SamplingParams(max_tokens=12)
    chats = [prompt_ids(llm.tokenizer, [{"role": "user", "content": q}]) for q in questions]
    emitted = [llm.generate([ids], params)[0].text for ids in chats]
    wanted = [text if i % 2 else "something else" for i, text in enumerate(emitted)]
    rows = zip(questions, wanted, strict=True)
    file = tmp_path / "questions.jsonl"
    file.write_text("".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in rows))
    (tmp_path / "local.yaml").write_text(TASK.format(file=file))
    where = f"model={MODEL},base_url={running.url}/v1/chat/completions,num_concurrent=3"
    subprocess.run(
        [
            sys.executable, "-m", "lm_eval", "run", "--model", "local-chat-completions",
            "--model_args", where, "--tasks", "local", "--include_path", tmp_path,
            "--apply_chat_template", "--output_path", tmp_path / "out", "--log_samples",
        ],
        env=os.environ | OFFLINE | {"HF_HOME": str(tmp_path / "cache")},
        check=True,
        timeout=300,
    )  # fmt: skip
    [report] = (tmp_path / "out").rglob("results_*.json")
    results: dict[str, Any] = json.loads(report.read_text())["results"]["local"]
    assert results["exact_match,none"] == 0.5
    [samples] = (tmp_path / "out").rglob("samples_*.jsonl")
    told = [json.loads(line) for line in samples.read_text().splitlines()]
    assert {t["doc"]["question"]: t["resps"][0][0] for t in told} == dict(
        zip(questions, emitted, strict=True)
    )
