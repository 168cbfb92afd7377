"""The entry point of our images, and a live run of it without a container.

`tests/vllm/test_serve_with_vllm.py` starts the real vLLM by it.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest
from refusals import refused
from tiny import make_target, save_target

from peagle.catalog import find_entry
from peagle.deploy.container import command, main
from peagle.deploy.plan import Choices, make_plan


def test_the_command_of_a_plan() -> None:
    plan = make_plan("smollm2-135m", find_entry("smollm2-135m"), "sagemaker", Choices(image="me:1"))
    line = command({"PEAGLE_SERVE": " ".join(plan.argv), "SAGEMAKER_BIND_TO_PORT": "9000"})
    assert line[:6] == ["serve", "--host", "0.0.0.0", "--port", "9000", "--allow-no-key"]
    assert line[6:] == ["--allowed-hosts", "*", *plan.argv]


@pytest.mark.parametrize("engine", [["--engine", "vllm"], ["--engine=vllm"]])
def test_vllm_has_no_host_names(engine: list[str]) -> None:
    line = command({"PEAGLE_SERVE": f"'/opt/ml/a model' {' '.join(engine)} -- --enforce-eager"})
    assert line[4:] == [
        "8080", "--allow-no-key", "/opt/ml/a model", *engine, "--", "--enforce-eager"
    ]  # fmt: skip


def test_a_model_called_vllm_has_host_names() -> None:
    assert "--allowed-hosts" in command({"PEAGLE_SERVE": "me --served-model-name vllm"})


@pytest.mark.parametrize("given", ["", "'open"])
def test_refusals(given: str) -> None:
    with refused("PEAGLE_SERVE"):
        command({"PEAGLE_SERVE": given})


def test_other_arguments_are_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["train"])
    error = capsys.readouterr().err
    assert ended.value.code == 2 and len(error.splitlines()) == 1
    assert error.startswith("peagle: unknown argument train")


def test_torch_is_not_imported() -> None:
    code = "import sys, peagle.deploy.container; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_live_run(tmp_path: Path) -> None:
    """As SageMaker does, but for the container: /ping, /invocations, SIGTERM."""
    save_target(make_target(), tmp_path)
    environ = os.environ | {
        # The tests open nothing to others.
        "PEAGLE_SERVE": f"{tmp_path} --served-model-name me --engine native --host 127.0.0.1",
        "SAGEMAKER_BIND_TO_PORT": "0",
        "OMP_NUM_THREADS": "1",
    }
    line = [sys.executable, "-m", "peagle.deploy.container", "serve"]
    process = subprocess.Popen(line, stderr=subprocess.PIPE, text=True, env=environ)
    try:
        assert process.stderr is not None
        ready = next(line for line in process.stderr if line.startswith("{"))
        url = f"http://127.0.0.1:{json.loads(ready)['port']}"
        with httpx2.Client(base_url=url, timeout=60) as http:
            assert http.get("/ping").status_code == 200
            asked = {"model": "me", "max_tokens": 3, "temperature": 0}
            text = http.post("/invocations", json={**asked, "prompt": "the cat"})
            assert text.json()["object"] == "text_completion"
            messages = [{"role": "user", "content": "the cat"}]
            chat = http.post("/invocations", json={**asked, "messages": messages})
            assert chat.json()["object"] == "chat.completion"
            attributes = {"X-Amzn-SageMaker-Custom-Attributes": "trace=1,route=/v1/completions"}
            both = {**asked, "messages": messages, "prompt": "the cat"}
            routed = http.post("/invocations", json=both, headers=attributes)
            assert routed.json()["object"] == "text_completion"
            nowhere = {"X-Amzn-SageMaker-Custom-Attributes": "route=/nowhere"}
            assert http.post("/invocations", json=asked, headers=nowhere).status_code == 404
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.communicate()
