"""heads/run.sh starts, pauses, stops and continues, and heads/gpu.sh divides its time, with
stand-ins for peagle and python."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]
# Counts tokens as fast as it can; SIGTERM leaves a checkpoint, as peagle does.
PEAGLE = """#!/usr/bin/env python3
import json, pathlib, signal, sys, time
args = sys.argv[1:]
folder = pathlib.Path(args[args.index("--output") + 1])
folder.mkdir(parents=True, exist_ok=True)
pathlib.Path("calls").open("a").write(" ".join(args) + "\\n")
if args[0] == "data":
    sys.exit()
stop = []
signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
lines = folder / "metrics.jsonl"
seen = json.loads(lines.read_text().splitlines()[-1])["answer_tokens"] if lines.exists() else 0
most = int(args[args.index("--max-train-tokens") + 1])
while not stop and seen < most:
    seen += 10_000
    line = {"step": 1, "answer_tokens": seen, "accuracy": [0.5] * 3000, "acceptance_length": 2.5}
    line["seconds"] = seen / 200_000
    lines.open("a").write(json.dumps(line) + "\\n")
    time.sleep(0.05)
(folder / "checkpoints").mkdir(exist_ok=True)
"""
# Of heads/: says what it was asked. An answer is its prompt, the last one not whole, since time was
# over; whoever trains waits for them. Where `fails` is there, nothing is answered, once both wait.
PYTHON = """#!/bin/sh
trap 'echo ended >>python_calls; exit' TERM
echo "${1##*/} $*" >>python_calls
case $1 in
  */generate.py)
    [ ! -f ready ] || touch early
    if [ -f ../fails ]; then
      until [ $(grep -c ^by_clock python_calls) = 2 ]; do sleep 0.05; done
      exit 1
    fi
    if [ $3 = ask/sampled.jsonl ]; then echo '{"of": "sampled"}' >$4; else cp $3 $4; fi
    printf '{"prompt_ids": [1' >>$4 ;;
  */by_clock.py) while [ ! -f ready ]; do sleep 0.05; done ;;
esac
"""
# The seconds since 1970 when a run starts, and ever after.
DATE = "#!/bin/sh\necho 1000\n"
# A session of its own, without lower priority: with other tests it would get no time.
SETSID = """#!/usr/bin/env python3
import os, sys
os.setsid()
os.execvp(sys.argv[5], sys.argv[5:])
"""
# Makes what is missing, as heads/data.sh does.
DATA = """#!/bin/sh
[ -f "$2/greedy.jsonl" ] || echo {} >"$2/greedy.jsonl"
"""


def stand_in(file: Path, script: str) -> None:
    file.parent.mkdir(exist_ok=True)
    # Not the python3 of PATH: that may put folders of its own before the stand-ins.
    file.write_text(script.replace("/usr/bin/env python3", sys.executable))
    file.chmod(0o755)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A run's folder whose data are made, with heads that saw 59.5 million tokens."""
    made = tmp_path / "run"
    heads = made / "tree" / "heads"
    heads.mkdir(parents=True)
    shutil.copy(ROOT / "heads" / "run.sh", heads)
    for method in ("p-eagle", "eagle3"):
        record = {"peagle": {"provenance": {"data": {"answer_tokens": 59_500_000}}}}
        head = heads / f"smollm2-135m-{method}"
        head.mkdir()
        (head / "config.json").write_text(json.dumps(record, indent=2))
    data = made / "data"
    data.mkdir()
    first = ("mixed", "sampled", "greedy", "more_answers_smollm2", "answers_smollm2")
    for name in (*first, "asked", "synth", "more"):
        (data / f"{name}.jsonl").write_text("{}\n")
    (data / "measured.jsonl").write_text("{}\n")
    sums = subprocess.run(["sha256sum", "greedy.jsonl"], cwd=data, capture_output=True, check=True)
    (heads / "run.sha256").write_bytes(sums.stdout)
    stand_in(heads / "data.sh", DATA)
    for name, script in (("peagle", PEAGLE), ("setsid", SETSID), ("python", "#!/bin/sh\n")):
        stand_in(tmp_path / "bin" / name, script)
    yield made
    run(made, "stop")
    wait(lambda: "stopped" in run(made, "status").stdout)


def run(folder: Path, *words: str, clone: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command, *rest = words
    path = f"{folder.parent / 'bin'}:{os.environ['PATH']}"
    return subprocess.run(
        [clone / "heads" / "run.sh", command, folder, *rest],
        env=os.environ | {"PATH": path}, capture_output=True, text=True, check=False,
    )  # fmt: skip


def wait(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.1)


def seen(folder: Path) -> int:
    """Tokens that P-EAGLE's head has seen, by `status`."""
    lines = run(folder, "status").stdout.splitlines()
    [line] = [line for line in lines if line.startswith("p-eagle")]
    return int(line.split()[1])


def test_a_run_is_started_paused_stopped_and_goes_on(folder: Path) -> None:
    assert seen(folder) == 59_500_000
    assert run(folder, "start").stdout.startswith("started")
    assert "runs already" in run(folder, "start").stderr
    wait(lambda: seen(folder) > 59_500_000)
    assert run(folder, "pause").returncode == 0
    wait(lambda: "paused" in run(folder, "status").stdout)
    there = seen(folder)
    time.sleep(0.5)
    assert seen(folder) == there
    assert "2.5" in run(folder, "status").stdout
    run(folder, "go")
    wait(lambda: seen(folder) > there)
    run(folder, "stop")
    wait((folder / "eagle3" / "checkpoints").is_dir)
    wait(lambda: "stopped" in run(folder, "status").stdout)
    first = (folder / "calls").read_text().splitlines()
    assert [line.split()[:2] for line in first] == [["data", "capture"], ["train", "smollm2-135m"],
                                                    ["train", "smollm2-135m"]]  # fmt: skip
    assert all("--max-train-tokens 14500000" in line for line in first[1:])
    run(folder, "start")
    wait(lambda: len((folder / "calls").read_text().splitlines()) >= 5)
    again = (folder / "calls").read_text().splitlines()[3:5]
    assert [line.split()[0] for line in again] == ["train", "train"], "the part is captured"
    # Where a run was killed before its first checkpoint, it begins.
    assert all("--resume auto" in line for line in first[1:] + again)


def test_a_start_links_its_files_and_copies_the_whole_tree(tmp_path: Path) -> None:
    """Files of any names, and others later; half a copy that another start left is none."""
    clone, folder = tmp_path / "clone", tmp_path / "run"
    stand_in(tmp_path / "bin" / "peagle", PEAGLE)
    stand_in(tmp_path / "bin" / "setsid", SETSID)
    (clone / "peagle").mkdir(parents=True)
    (clone / "heads").mkdir()
    shutil.copy(ROOT / "heads" / "run.sh", clone / "heads")
    (folder / "tree.new" / "half").mkdir(parents=True)
    names = ("train_prompts", "answers_smollm2", "more_answers_smollm2")
    for text in ("one", "two"):
        files = [tmp_path / f"{text}-{number}.gz" for number in range(3)]
        for file in files:
            file.write_text(file.name)
        assert run(folder, "start", *map(str, files), clone=clone).returncode == 0
        wait(lambda: "stopped" in run(folder, "status").stdout)
        linked = [(folder / "data" / f"{name}.jsonl.gz").read_text() for name in names]
        assert linked == [file.name for file in files]
    assert sorted(path.name for path in (folder / "tree").iterdir()) == ["heads", "peagle"]
    assert not (folder / "tree.new").exists()


def test_another_process_with_its_number_is_let_alone(folder: Path) -> None:
    """As after a reboot."""
    run(folder, "start")
    wait((folder / "calls").exists)
    run(folder, "stop")
    wait(lambda: "stopped" in run(folder, "status").stdout)
    group = folder / "group"
    number = group.read_text().split()[0]
    with subprocess.Popen(["sleep", "100"], start_new_session=True) as other:
        try:
            group.write_text(group.read_text().replace(number, str(other.pid), 1))
            assert "stopped" in run(folder, "status").stdout
            assert "not running" in run(folder, "stop").stderr
            assert other.poll() is None
        finally:
            other.kill()


def test_a_part_that_is_half_captured_is_none(folder: Path) -> None:
    peagle = folder.parent / "bin" / "peagle"
    peagle.write_text(PEAGLE.replace("    sys.exit()", "    sys.exit(1)"))
    run(folder, "start")
    wait(lambda: "stopped" in run(folder, "status").stdout)
    assert run(folder, "status").stdout.splitlines()[0].endswith("captured: ")
    assert [part.name for part in (folder / "captured").iterdir()] == [".mixed"]
    peagle.write_text(PEAGLE)
    run(folder, "start")
    wait((folder / "captured" / "mixed").is_dir)


def test_the_next_part_is_captured_when_the_last_was_seen_enough(folder: Path) -> None:
    for method in ("p-eagle", "eagle3"):
        config = folder / "tree" / "heads" / f"smollm2-135m-{method}" / "config.json"
        config.write_text(config.read_text().replace("59500000", "73900000"))
    run(folder, "start")
    wait(lambda: seen(folder) == 74_000_000)
    captures = [line for line in (folder / "calls").read_text().splitlines() if line[:4] == "data"]
    assert len(captures) == 1 and "more.jsonl" in captures[0], "what was seen before is left out"


@pytest.mark.parametrize("off", [-60_000, 500_000])
def test_the_last_part_ends_when_its_steps_are_done(folder: Path, off: int) -> None:
    """They are counted by the mean tokens of a step, so it ends before the goal, or after it: never
    cut short, which would leave the learning rate high, and never taken for a failure."""
    for method in ("p-eagle", "eagle3"):
        config = folder / "tree" / "heads" / f"smollm2-135m-{method}" / "config.json"
        config.write_text(config.read_text().replace("59500000", "73900000"))
    peagle = folder.parent / "bin" / "peagle"
    peagle.write_text(PEAGLE.replace("while not stop", f"most += {off}\nwhile not stop"))
    for _ in range(2):  # the second time there is nothing left to do
        run(folder, "start")
        wait(lambda: "stopped" in run(folder, "status").stdout)
        assert seen(folder) == 74_000_000 + off
        assert "heads/run.sh:" not in (folder / "log").read_text()


def test_a_trainer_that_fails_is_told(folder: Path) -> None:
    peagle = folder.parent / "bin" / "peagle"
    peagle.write_text(PEAGLE.replace("stop = []", "sys.exit(1)"))
    for tokens, until in (("59500000", 60), ("73900000", 74)):
        for method in ("p-eagle", "eagle3"):
            config = folder / "tree" / "heads" / f"smollm2-135m-{method}" / "config.json"
            config.write_text(config.read_text().replace("59500000", tokens))
        run(folder, "start")
        wait(lambda: "stopped" in run(folder, "status").stdout)
        assert f"stopped before {until}000000 tokens" in (folder / "log").read_text()


def test_a_branch_is_a_copy_whose_rate_falls(folder: Path) -> None:
    run(folder, "start")
    wait(lambda: seen(folder) > 59_500_000)
    assert "pause or stop it first" in run(folder, "branch", "one", "100000").stderr
    run(folder, "stop")
    wait(lambda: "stopped" in run(folder, "status").stdout)
    before = (folder / "p-eagle" / "metrics.jsonl").read_text()
    assert run(folder, "branch", "one", "100000").returncode == 0
    assert (folder / "p-eagle" / "metrics.jsonl").read_text() == before
    lines = (folder / "branches" / "one" / "p-eagle" / "metrics.jsonl").read_text().splitlines()
    started = json.loads(before.splitlines()[-1])["answer_tokens"]
    assert json.loads(lines[-1])["answer_tokens"] == started + 100_000
    calls = (folder / "calls").read_text().splitlines()[-2:]  # one of each method
    [call] = [line for line in calls if "--method p-eagle" in line]
    share = float(call.split("--cooldown ")[1].split()[0])
    assert share == pytest.approx(100_000 / (started + 100_000), rel=1e-3)
    assert "is there already" in run(folder, "branch", "one", "100000").stderr


def test_a_branch_reads_documents_in_the_order_of_its_run(folder: Path) -> None:
    for part in ("asked", "mixed", "sampled"):
        (folder / "captured" / part).mkdir(parents=True)
    for method in ("p-eagle", "eagle3"):
        (folder / method / "checkpoints").mkdir(parents=True)
        (folder / method / "metrics.jsonl").write_text('{"answer_tokens": 1000}\n')
    assert run(folder, "branch", "one", "10000").returncode == 0
    calls = (folder / "calls").read_text().splitlines()
    read = [[b for a, b in pairwise(call.split()) if a == "--data"] for call in calls]
    assert read == [["captured/mixed", "captured/asked", "captured/sampled"]] * 2


def test_data_that_changed_are_named(folder: Path) -> None:
    (folder / "data" / "greedy.jsonl").write_text("other\n")
    run(folder, "start")
    wait(lambda: "stopped" in run(folder, "status").stdout)
    log = (folder / "log").read_text()
    assert "greedy.jsonl: FAILED" in log and "not the files of heads/run.sha256" in log
    assert not (folder / "calls").exists()


def test_data_that_were_deleted_are_made_again(folder: Path) -> None:
    """As that error tells to."""
    (folder / "data" / "greedy.jsonl").unlink()
    run(folder, "start")
    wait((folder / "calls").exists)
    assert "run.sha256" not in (folder / "log").read_text()


def test_bad_calls(tmp_path: Path) -> None:
    script = ROOT / "heads" / "run.sh"
    assert subprocess.run([script], capture_output=True, check=False).returncode == 2
    refused = run(tmp_path / "new", "start", "none.jsonl", "b", "c")
    assert refused.returncode == 2 and "none.jsonl: no such file" in refused.stderr
    assert "not running" in run(tmp_path / "new", "pause").stderr


Gpu = Callable[[], subprocess.CompletedProcess[str]]


@pytest.fixture
def gpu(tmp_path: Path) -> Gpu:
    """Runs heads/gpu.sh for 80 seconds, in the folder `run`, which has seven prompts to answer."""
    heads = tmp_path / "heads"
    heads.mkdir()
    shutil.copy(ROOT / "heads" / "gpu.sh", heads)
    control = "nvidia-cuda-mps-control"
    for name, script in (("python", PYTHON), ("date", DATE), (control, "#!/bin/sh\n")):
        stand_in(tmp_path / "bin" / name, script)
    ask = tmp_path / "run" / "ask"
    ask.mkdir(parents=True)
    (ask / "greedy.jsonl").write_text("".join(f'{{"prompt_ids": [{n}]}}\n' for n in range(7)))
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"

    def run_it() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [heads / "gpu.sh", "run", tmp_path / "run", "80"],
            env=os.environ | {"PATH": path, "CUDA_MPS_PIPE_DIRECTORY": str(tmp_path / "mps")},
            capture_output=True, text=True, check=False,
        )  # fmt: skip

    return run_it


def test_a_gpu_needs_prompts(tmp_path: Path, gpu: Gpu) -> None:
    (tmp_path / "run" / "ask" / "greedy.jsonl").unlink()
    refused = gpu()
    assert refused.returncode == 2 and "ask/greedy.jsonl: no such file" in refused.stderr


def test_a_gpu_that_answers_nothing(tmp_path: Path, gpu: Gpu) -> None:
    """Those that wait for answers end, too."""
    (tmp_path / "fails").touch()
    failed = gpu()
    assert failed.returncode == 1 and "no answers were made" in failed.stderr
    calls = (tmp_path / "run" / "python_calls").read_text().splitlines()
    assert calls.count("ended") == 2 and not any("pack.py" in call for call in calls)


def test_a_training_that_fails_on_a_gpu_is_told(tmp_path: Path, gpu: Gpu) -> None:
    """Whichever of the two it is."""
    waiting = "while [ ! -f ready ]; do sleep 0.05; done"
    fails = PYTHON.replace(waiting, f"{waiting}; [ $2 != p-eagle ]")
    stand_in(tmp_path / "bin" / "python", fails)
    failed = gpu()
    assert failed.returncode == 1 and "a training failed" in failed.stderr
    calls = (tmp_path / "run" / "python_calls").read_text().splitlines()
    assert not any("pack.py" in call for call in calls)


def test_a_gpu_runs_again_in_one_folder(tmp_path: Path, gpu: Gpu) -> None:
    for _ in range(2):
        done = gpu()
        assert done.returncode == 0, done.stderr
        assert not (tmp_path / "run" / "early").exists(), "answers are taken before they are made"


def test_whoever_waits_for_answers_ends_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "heads")
    wait_for_answers = import_module("by_clock").Clocked._take_new
    for until, asked in ((0.0, False), (float("inf"), True)):  # time is over; by a signal
        trainer = SimpleNamespace(ready=tmp_path / "ready", until=until, _asked=asked)
        with pytest.raises(SystemExit, match="no new answers"):
            wait_for_answers(trainer)


def test_a_gpu_trains_in_the_seconds_it_is_given(tmp_path: Path, gpu: Gpu) -> None:
    """New text and both heads at once; the heads take it when all is there."""
    done = gpu()
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "mps").is_dir()
    run_folder = tmp_path / "run"
    new = [json.loads(line) for line in (run_folder / "new.jsonl").read_text().splitlines()]
    assert sorted(line["prompt_ids"][0] for line in new[:-1]) == list(range(7)), "none is lost"
    assert new[-1] == {"of": "sampled"} and (run_folder / "ready").exists()
    calls = (run_folder / "python_calls").read_text().splitlines()
    assert [call.split()[0] for call in calls[-2:]] == ["pack.py", "pack.py"]
    asked = [call for call in calls if call.startswith("generate.py")]
    assert len(asked) == 4 and all("--seconds 10" in call for call in asked)
    for method in ("p-eagle", "eagle3"):
        [call] = [call for call in calls if call.startswith("by_clock.py") and method in call]
        assert call.split()[4] == "1080"
