"""`peagle deploy --to local` and `--to sagemaker`: what is printed and refused."""

import io
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from runner import Words, invoke

from peagle.cli.main import load_command, main
from peagle.deploy import sagemaker
from peagle.deploy.plan import Plan
from peagle.deploy.sagemaker import Account

ROLE = "arn:aws:iam::123456789012:role/peagle"
THERE = ("--to", "sagemaker", "--region", "us-west-2")
AWS = (*THERE, "--role", ROLE, "--instance-type", "ml.p5.4xlarge")
LOCAL = ("--to", "local")


@pytest.fixture(autouse=True)
def nothing_of_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEAGLE_HOME", str(tmp_path))
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "PEAGLE_CATALOG"):
        monkeypatch.delenv(name, raising=False)


def served(*deploy: object) -> dict[str, Any]:
    """The options that `peagle serve` reads from the line that `deploy --to local` prints."""
    words = shlex.split(invoke("deploy", *deploy, *LOCAL).stdout)
    assert words[:2] == ["peagle", "serve"]
    return load_command("serve").make_context("serve", words[2:]).params


def test_local_prints_the_line_of_serve() -> None:
    """`serve` finds the head, and the entry's flags for vLLM; those of a profile follow --."""
    assert invoke("deploy", "smollm2-135m", *LOCAL).stdout == "peagle serve smollm2-135m\n"
    plain = served("gpt-oss-20b", "--dry-run")
    assert (plain["target"], plain["engine"], plain["head"]) == ("gpt-oss-20b", "auto", None)
    given = served("openai/gpt-oss-20b", "--engine", "native", "--head", "me/my-head", "--k", 4,
                   "--method", "eagle3", "--load", 3)  # fmt: skip
    assert (given["target"], given["head"]) == ("openai/gpt-oss-20b", "me/my-head")
    assert (given["k"], given["method"], given["max_batch"]) == (4, "eagle3", 3)
    profiled = served("gpt-oss-20b", "--profile", "benchmark")
    assert profiled["engine"] == "vllm"
    assert list(profiled["vllm_flags"]) == ["--stream-interval", "20", "--no-enable-prefix-caching"]


@pytest.mark.parametrize(
    ("options", "runs"), [((), False), (("--yes",), True), (("--yes", "--dry-run"), False)]
)
def test_local_runs_in_the_foreground(options: tuple[str, ...], runs: bool) -> None:
    """The line is printed before; `echo` stands in for the interpreter that runs `peagle serve`."""
    code = "import sys; sys.executable = '/bin/echo'; from peagle.cli.main import main; main()"
    command = [sys.executable, "-c", code, "deploy", "smollm2-135m", *LOCAL, *options]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    line = "peagle serve smollm2-135m\n"
    assert done.stdout == (f"{line}-m {line}" if runs else line)


def test_what_is_not_managed_here(refused) -> None:
    for place in ("local", "kubernetes"):
        assert "helm" in refused("deploy", "delete", "smollm2-135m", "--to", place, field="to")


@pytest.mark.parametrize(
    ("place", "options"),
    [
        ("local", ("--gpu", "h100")),
        ("local", ("--replicas", 1)),
        ("local", ("--namespace", "llm")),
        ("local", ("--region", "us-west-2")),
        ("kubernetes", ("--instance-type", "ml.p5.4xlarge")),
        ("kubernetes", ("--weights", "s3://a/b")),
        ("kubernetes", ("--region", "us-west-2")),
        ("sagemaker", ("--as", "stack")),
    ],
)
def test_options_of_other_places(refused, place: str, options: Words) -> None:
    field = {"--as": "form"}.get(str(options[0]), str(options[0])[2:].replace("-", "_"))
    refused("deploy", "gpt-oss-20b", "--to", place, "--dry-run", *options, field=field)


@pytest.mark.parametrize(
    ("place", "option", "value"),
    [
        ("kubernetes", "--region", "us-west-2"),
        ("sagemaker", "--url", "http://h"),
        ("sagemaker", "--api-key", "secret"),
    ],
)
def test_questions_with_options_of_other_places(
    refused, place: str, option: str, value: str
) -> None:
    field = option[2:].replace("-", "_")
    asked = ("deploy", "invoke", "gpt-oss-20b", "--to", place, option, value)
    assert "secret" not in refused(*asked, field=field)


def test_variables_of_other_places_may_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are there for other commands."""
    monkeypatch.setenv("AWS_REGION", "us-west-2")
    for place in ("local", "kubernetes"):
        assert invoke("deploy", "gpt-oss-20b", "--to", place, "--dry-run").stdout


def printed_template(*more: object, name: str = "gpt-oss-20b") -> dict[str, Any]:
    """The template that a dry run prints."""
    shown = invoke("deploy", name, "--to", "sagemaker", "--dry-run", *more).stdout
    return dict(yaml.safe_load(shown)["Resources"])


def test_a_sagemaker_dry_run_needs_no_boto3_and_no_account() -> None:
    code = "import sys; sys.modules['boto3'] = None; from peagle.cli.main import main; main()"
    line = ["deploy", "gpt-oss-20b", "--to", "sagemaker", "--dry-run"]
    command = [sys.executable, "-c", code, *line]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == invoke(*line).stdout and done.stderr == ""
    assert "ScalableTarget" not in printed_template()
    assert "ScalableTarget" in printed_template("--max-replicas", 2)


def test_sagemaker(monkeypatch: pytest.MonkeyPatch) -> None:
    def apply(plan: Plan, account: Account, region: str, report: Callable[[str], None]) -> None:
        assert (region, account.role, account.subnets) == ("us-west-2", ROLE, ("a", "b"))
        assert plan.instance_type == "ml.p5.4xlarge"
        report("made it")

    monkeypatch.setattr(sagemaker, "apply", apply)
    monkeypatch.setattr(sagemaker, "delete", lambda name, region, report: report(f"no {name}"))
    answer = b'data: {"choices": [{"delta": {"content": "Red."}}]}\n'
    monkeypatch.setattr(sagemaker, "invoke", lambda name, region, body: [answer])
    where = ("gpt-oss-20b", *THERE)
    network = ("--subnets", "a", "--subnets", "b", "--security-groups", "c")
    started = invoke("deploy", "gpt-oss-20b", *AWS, *network, "--yes")
    assert "is in service" in started.stdout and started.stderr == "made it\n"
    assert invoke("deploy", "delete", *where, "--yes").stderr == "no peagle-gpt-oss-20b\n"
    asked = invoke("deploy", "invoke", *where)
    assert asked.stdout == "Red." and "tokens a second" in asked.stderr


def test_a_start_needs_a_region_and_a_yes(refused) -> None:
    refused("deploy", "gpt-oss-20b", "--to", "sagemaker", "--yes", field="region")
    assert "costs money" in refused("deploy", "gpt-oss-20b", *AWS)


class Terminal(io.StringIO):
    """A terminal at which a question is answered, or Ctrl-C is pressed in place of an answer."""

    def isatty(self) -> bool:
        return True

    def readline(self, size: int | None = -1) -> str:
        if line := super().readline(-1 if size is None else size):
            return line
        raise KeyboardInterrupt


@pytest.mark.parametrize(("typed", "code", "said"), [("", 130, "stopped\n"), ("n\n", 1, "")])
@pytest.mark.parametrize("command", [("gpt-oss-20b", *AWS), ("delete", "gpt-oss-20b", *THERE)])
def test_a_question_without_a_yes(  # noqa: PLR0913, PLR0917 (fixtures)
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: Words,
    typed: str, code: int, said: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(sagemaker, "apply", None)
    monkeypatch.setattr(sagemaker, "delete", None)
    monkeypatch.setattr("sys.argv", ["peagle", "deploy", *command])
    monkeypatch.setattr("sys.stdin", Terminal(typed))
    with pytest.raises(SystemExit) as ended:
        main()
    assert (ended.value.code, capsys.readouterr().err) == (code, said)


@pytest.mark.parametrize("place", ["local", "kubernetes"])
def test_asking_a_model_that_does_not_answer(place: str) -> None:
    nowhere = ("--to", place, "--url", "http://127.0.0.1:1")
    [line] = invoke("deploy", "invoke", "gpt-oss-20b", *nowhere, code=1).stderr.splitlines()
    assert "no answer from http://127.0.0.1:1" in line


def environment(name: str) -> dict[str, str]:
    """The variables of the container in the template."""
    container = printed_template(name=name)["Model"]["Properties"]["PrimaryContainer"]
    return dict(container["Environment"])


def test_a_hub_id_is_deployed_as_its_entry() -> None:
    ours, theirs = environment("gpt-oss-20b"), environment("openai/gpt-oss-20b")
    assert theirs.pop("SM_VLLM_SERVED_MODEL_NAME") == "openai/gpt-oss-20b"
    assert ours.pop("SM_VLLM_SERVED_MODEL_NAME") == "gpt-oss-20b"
    assert theirs == ours


def test_a_hub_id_that_no_entry_knows(refused) -> None:
    remote = ("--to", "sagemaker", "--dry-run")
    shown = invoke("deploy", "owner/model", *remote)
    no_head, no_size = shown.stderr.splitlines()
    assert no_head == "warning: owner/model has no head: nothing will draft; name one with --head"
    assert no_size.startswith("warning: owner/model takes one rtx-pro-6000: ")
    headed = invoke("deploy", "owner/model", *LOCAL, "--head", "me/head", "--k", 4)
    assert headed.stderr == ""
    assert headed.stdout == "peagle serve owner/model --head me/head --k 4\n"
    assert "is not in the catalog" in refused("deploy", "./model", *LOCAL)


def test_bad_input(refused, tmp_path: Path) -> None:
    for place, options, field in (
        ("sagemaker", ("--k", 0), "k"),
        ("sagemaker", ("--head", tmp_path), "head"),
        ("kubernetes", ("--head", "s3://a/b"), "head"),
        ("kubernetes", ("--method", "medusa"), "method"),
        ("kubernetes", ("--gpu", "h1000"), "gpu"),
        ("kubernetes", ("--engine", "vlm"), "engine"),
        ("sagemaker", ("--instance-type", "ml.p5"), "instance_type"),
        ("sagemaker", ("--image", "1.dkr.ecr.us-east-1.amazonaws.com/vllm:0.17.0"), "image"),
    ):
        refused("deploy", "gpt-oss-20b", "--to", place, "--dry-run", *options, field=field)
    refused("deploy", "smollm2-135m", "--to", "sagemaker", "--dry-run", field="image")
    profiled = (*LOCAL, "--engine", "native", "--profile", "benchmark")
    refused("deploy", "gpt-oss-20b", *profiled, field="profile")
