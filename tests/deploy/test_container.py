"""The container's entrypoint: both rule sets, both engines, and a live run without a container.

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

from peagle.deploy.container import command, flags, main

OBJECT = '{"method": "eagle3", "num_speculative_tokens": 3}'
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
LORAS = '{"name":"a","path":"/a"} {"name":"b","path":"/b"}'

# variable, value, values by AWS's rules (None: no flag), values by vLLM's own
RULES: list[tuple[str, str, list[str] | None, list[str]]] = [
    ("TENSOR_PARALLEL_SIZE", "8", ["8"], ["8"]),
    ("ENFORCE_EAGER", "true", [], ["true"]),
    ("ENFORCE_EAGER", "True", [], ["True"]),
    ("ENFORCE_EAGER", " true ", [], [" true "]),
    ("ENFORCE_EAGER", "false", None, ["false"]),
    ("ENFORCE_EAGER", "FALSE", None, ["FALSE"]),
    ("ENFORCE_EAGER", "", [], []),
    ("SERVED_MODEL_NAME", '["one","two"]', ["one", "two"], ['["one","two"]']),
    ("CUDAGRAPH_CAPTURE_SIZES", "[1, 2, 4]", ["1", "2", "4"], ["[1, 2, 4]"]),
    ("CUSTOM_OPS", "[]", None, ["[]"]),
    ("CUSTOM_OPS", '[true, null, "a b"]', ["true", "", "a b"], ['[true, null, "a b"]']),
    ("LORA_MODULES", '[{"name": "a"}]', ['{"name":"a"}'], ['[{"name": "a"}]']),
    ("LORA_MODULES", LORAS, LORAS.split(), [LORAS]),
    ("LORA_MODULES", f"{LORAS}\n", LORAS.split(), [f"{LORAS}\n"]),
    ("LORA_MODULES", '{"name": "a"}', ['{"name": "a"}'], ['{"name": "a"}']),
    ("LORA_MODULES", "a=/loras/a", ["a=/loras/a"], ["a=/loras/a"]),
    ("LORA_MODULES", '[{"name":}]', ['[{"name":}]'], ['[{"name":}]']),
    ("SPECULATIVE_CONFIG", OBJECT, [OBJECT], [OBJECT]),
    ("SPECULATIVE_CONFIG", OBJECT.replace(" ", "\n"), [OBJECT.replace(" ", "\n")], [
        OBJECT.replace(" ", "\n")
    ]),
    ("ALLOWED_ORIGINS", '["https://a"]', ['["https://a"]'], ['["https://a"]']),
    ("MIDDLEWARE", "a.B", ["a.B"], ["a.B"]),
    ("CHAT_TEMPLATE", TEMPLATE, [TEMPLATE], [TEMPLATE]),
    ("DOWNLOAD_DIR", "/a folder", ["/a folder"], ["/a folder"]),
    ("LIMIT_MM_PER_PROMPT", '{"image": {"count": 2}}', ['{"image": {"count": 2}}'], [
        '{"image": {"count": 2}}'
    ]),
]  # fmt: skip


@pytest.mark.parametrize(("variable", "value", "aws", "plain"), RULES)
def test_rules(variable: str, value: str, aws: list[str] | None, plain: list[str]) -> None:
    environ, name = {f"SM_VLLM_{variable}": value}, variable.lower().replace("_", "-")
    assert flags(environ, "aws") == ({} if aws is None else {name: aws})
    assert flags(environ, "plain") == {name: plain}


def test_other_variables_are_no_flags() -> None:
    assert flags({"PATH": "/bin", "HF_TOKEN": "a", "VLLM_X": "1", "SM_VLLM_A": "1"}, "aws") == {
        "a": ["1"]
    }


def test_which_model(tmp_path: Path) -> None:
    empty, full = tmp_path / "empty", tmp_path / "full"
    empty.mkdir()
    (full / "sub").mkdir(parents=True)
    named, hub = {"SM_VLLM_MODEL": "owner/named"}, {"HF_MODEL_ID": "owner/hub"}
    for environ, folder, model in (
        (named | hub, full, "owner/named"),
        (hub, full, str(full)),
        (hub, empty, "owner/hub"),
        (hub | {"SM_VLLM_MODEL": ""}, tmp_path / "none", "owner/hub"),
    ):
        line = command(environ, folder)
        assert line[:2] == ["serve", model]
        assert line[line.index("--served-model-name") + 1] == model
    with refused():
        command({}, empty)


def test_our_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    speculative = {"model": "owner/head", "num_speculative_tokens": 3, "parallel_drafting": True}
    environ = {
        "SM_VLLM_MODEL": "owner/model",
        "SM_VLLM_SPECULATIVE_CONFIG": json.dumps(speculative | {"method": "eagle3"}),
        "SM_VLLM_MAX_NUM_SEQS": "4",
        "SM_VLLM_DTYPE": "bfloat16",
        "SM_VLLM_SERVED_MODEL_NAME": "me",
        "SM_VLLM_ENFORCE_EAGER": "false",
        "SAGEMAKER_BIND_TO_PORT": "9000",
    }
    assert command(environ) == [
        *("serve", "owner/model", "--engine", "native", "--allow-no-key", "--allowed-hosts", "*"),
        *("--host", "0.0.0.0", "--port", "9000", "--dtype", "bfloat16", "--max-batch", "4"),
        *("--served-model-name", "me", "--head", "owner/head", "--k", "3"),
    ]


def test_vllm() -> None:
    environ = {
        "PEAGLE_ENGINE": "vllm",
        "SM_VLLM_MODEL": "owner/model",
        "SM_VLLM_SPECULATIVE_CONFIG": OBJECT,
        "SM_VLLM_ENFORCE_EAGER": "true",
        "SM_VLLM_SERVED_MODEL_NAME": '["one", "two"]',
        "SM_VLLM_API_KEY": "secret",
    }
    shared = ["serve", "owner/model", "--engine", "vllm", "--allow-no-key"]
    shared += ["--host", "0.0.0.0", "--port", "8080", "--api-key", "secret", "--"]
    after = ["--enforce-eager", "--served-model-name", "one", "two"]
    after += ["--speculative-config", OBJECT]
    route = ["--middleware", "peagle.server.middleware.Route"]
    assert command(environ) == [*shared, *after, *route]
    elsewhere = environ | {"PEAGLE_VLLM_PYTHON": "/vllm/bin/python"}
    assert command(elsewhere) == [*shared, *after], "vLLM's environment may lack this package"
    line = command({"PEAGLE_ENGINE": "vllm", "SM_VLLM_MODEL": "owner/model"})
    assert line[line.index("--served-model-name") :] == [
        "--served-model-name",
        "owner/model",
        "--",
        *route,
    ]


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("PEAGLE_SM_RULES", "mine"),
        ("PEAGLE_ENGINE", "mine"),
        ("SM_VLLM_ENABLE_LORA", "true"),
        ("SM_VLLM_DTYPE", '["a", "b"]'),
        ("SM_VLLM_HOST", ""),
        ("SM_VLLM_SPECULATIVE_CONFIG", "eagle"),
        ("SM_VLLM_SPECULATIVE_CONFIG", '{"x": 1}'),
    ],
)
def test_refusals(variable: str, value: str) -> None:
    with refused(variable):
        command({"SM_VLLM_MODEL": "owner/model", variable: value})


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
        "SM_VLLM_MODEL": str(tmp_path),
        "SM_VLLM_SERVED_MODEL_NAME": "me",
        "SM_VLLM_HOST": "127.0.0.1",  # the tests open nothing to others
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
            attributes = {"X-Amzn-SageMaker-Custom-Attributes": "trace=1,route=/tokenize"}
            routed = http.post("/invocations", json={"prompt": "the cat"}, headers=attributes)
            assert routed.json()["count"] > 0
            nowhere = {"X-Amzn-SageMaker-Custom-Attributes": "route=/nowhere"}
            assert http.post("/invocations", json=asked, headers=nowhere).status_code == 404
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.communicate()
