"""The templates in docs/jobs: their torchrun lines with two processes on a CPU, as far as that
goes, and the forms that their schedulers read."""

import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from botocore.session import Session
from botocore.validate import ParamValidator
from tiny import make_target, own_answers, save_target
from torch.distributed.launcher import api as launcher

JOBS = Path(__file__).resolve().parents[2] / "docs" / "jobs"
TIMEOUT = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"  # seconds from SIGTERM to SIGKILL
SMALL = "--batch 2 --steps 2 --layers 1 --depths 2 --max-length 64"
# Slurm's own commands on one machine: the node is this one, and srun runs its arguments.
STAND_INS = {"scontrol": "echo 127.0.0.1", "srun": 'exec "$@"'}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(make_target(layers=8), tmp_path_factory.mktemp("model"))


@pytest.fixture
def place(tmp_path: Path, model: Path) -> dict[str, str]:
    """Variables of a job: programs, model, data, and a folder for the run."""
    answers = tmp_path / "answers.jsonl"
    with answers.open("w") as file:
        for number, example in enumerate(own_answers(make_target(layers=8), 8)):
            start = example.supervised.index(True)
            ids = {"prompt_ids": example.ids[:start], "answer_ids": example.ids[start:]}
            print(json.dumps({"record": number, **ids}), file=file)
    programs = tmp_path / "programs"
    programs.mkdir()
    torchrun = f'exec {sys.executable} -m torch.distributed.run "$@"'
    for name, body in {**STAND_INS, "torchrun": torchrun}.items():
        (programs / name).write_text(f"#!/bin/bash\n{body}\n")
        (programs / name).chmod(0o755)
    path = os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ["PATH"]])
    named = {"TARGET": str(model), "DATA": str(answers), "RUN": str(tmp_path / "run")}
    return {**os.environ, **named, "PATH": path, "OMP_NUM_THREADS": "1"}


def bash(environ: dict[str, str], *arguments: str) -> None:
    command = ["bash", *arguments]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def assert_trained(environ: dict[str, str], steps: int) -> None:
    run = Path(environ["RUN"])
    assert len((run / "metrics.jsonl").read_text().splitlines()) == steps
    assert (run / "head" / "model.safetensors").is_file()


@pytest.mark.slow
def test_slurm_trains_and_goes_on(place: dict[str, str]) -> None:
    slurm = {"SLURM_JOB_NODELIST": "node1", "SLURM_NNODES": "1", "SLURM_JOB_ID": "7"}
    given = place | slurm | {"GPUS": "2"}
    bash(given, str(JOBS / "slurm.sh"), *SMALL.split())
    assert_trained(given, 2)
    bash(given, str(JOBS / "slurm.sh"), *SMALL.replace("--steps 2", "--steps 3").split())
    assert_trained(given, 3)


@pytest.mark.slow
def test_slurm_captures_in_parts(place: dict[str, str], tmp_path: Path) -> None:
    given = place | {"CAPTURED": str(tmp_path / "captured"), "PARTS": "2"}
    for part in ("1", "2"):
        number = {"SLURM_ARRAY_TASK_ID": part}
        bash(given | number, str(JOBS / "slurm-capture.sh"), "--shard-mb", "0.01")
    assert len(list((tmp_path / "captured").rglob("*.safetensors"))) >= 2


@pytest.mark.slow
def test_skypilot_trains(place: dict[str, str]) -> None:
    sky = {"SKYPILOT_NUM_NODES": "1", "SKYPILOT_NODE_RANK": "0", "SKYPILOT_NUM_GPUS_PER_NODE": "2",
           "SKYPILOT_NODE_IPS": "127.0.0.1\n10.0.0.2", "OPTIONS": SMALL}  # fmt: skip
    task = yaml.safe_load((JOBS / "skypilot.yaml").read_text())
    assert place.keys() >= task["envs"].keys() - {"OPTIONS", TIMEOUT}
    bash(place | sky, "-c", task["run"])
    assert_trained(place, 2)


def sagemaker_line(place: dict[str, str], host: str, **named: str) -> list[str]:
    """The arguments of SageMaker's shell on a host, with other texts in the places of its own; pip
    installs nothing."""
    job = runpy.run_path(str(JOBS / "sagemaker.py"))
    config = Path(place["RUN"]).with_name(f"{host}.json")
    config.write_text(json.dumps({"current_host": host, "hosts": ["algo-1", "algo-2"]}))
    line = shlex.join(job["request"]()["AlgorithmSpecification"]["ContainerArguments"])
    for text, other in {job["HOSTS"]: str(config), "pip install": ":", **named}.items():
        assert text in line
        line = line.replace(text, other)
    return shlex.split(line)


@pytest.mark.slow
def test_sagemaker_trains(place: dict[str, str]) -> None:
    named = {"--nnodes 2": "--nnodes 1", "--nproc-per-node 8": "--nproc-per-node 2",
             "--master-addr algo-1": "--master-addr 127.0.0.1", "my-org/my-model": place["TARGET"],
             "/opt/ml/input/data/data/answers.jsonl": place["DATA"],
             "/opt/ml/checkpoints": place["RUN"], "--batch 64": SMALL}  # fmt: skip
    bash(place, "-c", *sagemaker_line(place, "algo-1", **named))
    assert_trained(place, 2)


@pytest.mark.parametrize(("host", "rank"), [("algo-1", 0), ("algo-2", 1)])
def test_sagemaker_numbers_its_nodes(place: dict[str, str], host: str, rank: int) -> None:
    """By its own configuration: a host's name does not say which one it is."""
    said = Path(place["RUN"]).with_name("said")
    torchrun = Path(place["PATH"].split(os.pathsep)[0]) / "torchrun"
    torchrun.write_text(f'#!/bin/bash\necho "$@" >{said}\n')
    bash(place, "-c", *sagemaker_line(place, host))
    words = said.read_text().split()
    assert words[:4] == ["--node-rank", str(rank), "--nnodes", "2"]
    assert words[words.index("--master-addr") + 1] == "algo-1"


def test_torchrun_waits_for_a_checkpoint() -> None:
    """As long as its scheduler, instead of its own 30 seconds."""
    slurm = (JOBS / "slurm.sh").read_text()
    [limit] = re.findall(r"--signal=TERM@(\d+)", slurm)
    [seconds] = re.findall(rf"^export {TIMEOUT}=(\d+)", slurm, re.MULTILINE)
    assert 30 < int(seconds) < int(limit)
    request = runpy.run_path(str(JOBS / "sagemaker.py"))["request"]()
    task = yaml.safe_load((JOBS / "skypilot.yaml").read_text())
    assert request["Environment"][TIMEOUT] == task["envs"][TIMEOUT] == seconds
    assert TIMEOUT in Path(launcher.__file__).read_text()


def faults(request: dict[str, Any]) -> str:
    operation = Session().get_service_model("sagemaker").operation_model("CreateTrainingJob")
    return str(ParamValidator().validate(request, operation.input_shape).generate_report())


def test_sagemaker_takes_the_request() -> None:
    request = runpy.run_path(str(JOBS / "sagemaker.py"))["request"]()
    assert faults(request) == ""
    shapes = Session().get_service_model("sagemaker")
    kinds = shapes.shape_for("TrainingInstanceType").enum
    assert request["ResourceConfig"]["InstanceType"] in kinds
    longest = shapes.shape_for("TrainingContainerArgument").metadata["max"]  # botocore lets it pass
    arguments = request["AlgorithmSpecification"]["ContainerArguments"]
    assert max(map(len, arguments)) <= longest
    assert "RolArn" in faults({**request, "RolArn": request.pop("RoleArn")})


def test_shell_is_well_formed() -> None:
    assert shutil.which("bash")
    for script in JOBS.glob("*.sh"):
        subprocess.run(["bash", "-n", str(script)], check=True)
    task = yaml.safe_load((JOBS / "skypilot.yaml").read_text())
    for part in ("setup", "run"):
        subprocess.run(["bash", "-nc", task[part]], check=True)
