"""`peagle deploy --to local` and `--to sagemaker`: what is printed and refused."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from runner import invoke

from peagle.cli import serve
from peagle.deploy import sagemaker

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
    return typer.main.get_command(serve.app).make_context("serve", words[2:]).params


def test_local_prints_the_line_of_serve() -> None:
    assert invoke("deploy", "smollm2-135m", *LOCAL).stdout == (
        "peagle serve smollm2-135m --engine native\n"
    )
    plain = served("smollm2-135m", "--dry-run")
    assert (plain["target"], plain["engine"], plain["port"]) == ("smollm2-135m", "native", 8000)
    given = served("openai/gpt-oss-20b", "--engine", "native", "--head", "me/my-head", "--k", 4,
                   "--port", 0)  # fmt: skip
    assert (given["target"], given["head"]) == ("openai/gpt-oss-20b", "me/my-head")
    assert (given["k"], given["port"]) == (4, 0)


def test_local_with_vllm() -> None:
    """`peagle serve` knows the entry's flags; those of a profile follow --."""
    plain = served("gpt-oss-20b", "--engine", "vllm")
    assert plain["engine"] == "vllm" and not plain["vllm_flags"]
    assert (plain["head"], plain["k"]) == ("amazon/GPT-OSS-20B-P-EAGLE", 7)
    profiled = served("gpt-oss-20b", "--engine", "vllm", "--profile", "benchmark", "--port", 1)
    assert list(profiled["vllm_flags"]) == ["--stream-interval", "20", "--no-enable-prefix-caching"]
    assert profiled["port"] == 1


def test_local_with_a_catalog_of_ones_own(tmp_path: Path) -> None:
    """The line can be pasted into a shell: paths are quoted."""
    file = tmp_path / "my own.yaml"
    file.write_text(yaml.safe_dump({"mine": {"target": "owner/model", "heads": {}}}))
    line = invoke("deploy", "mine", *LOCAL, "--catalog", file).stdout
    assert line == f"PEAGLE_CATALOG='{file}' peagle serve mine --engine native\n"


@pytest.mark.parametrize(
    ("options", "runs"), [((), False), (("--yes",), True), (("--yes", "--dry-run"), False)]
)
def test_local_runs_in_the_foreground(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: tuple[str, ...], runs: bool
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump({"mine": {"target": "owner/model", "heads": {}}}))
    became = list[tuple[list[str], str]]()

    def execve(program: str, line: list[str], environ: dict[str, str]) -> None:
        assert program == sys.executable and environ["PATH"] == os.environ["PATH"]
        became.append((line[1:], environ["PEAGLE_CATALOG"]))

    monkeypatch.setattr(os, "execve", execve)
    shown = invoke("deploy", "mine", *LOCAL, "--catalog", file, *options).stdout
    assert shown.endswith("peagle serve mine --engine native\n")
    line = ["-m", "peagle", "serve", "mine", "--engine", "native"]
    assert became == ([(line, str(file))] if runs else [])


def test_local_becomes_what_it_printed() -> None:
    """The line is printed before; `echo` stands in for the interpreter that runs `peagle serve`."""
    code = "import sys; sys.executable = '/bin/echo'; from peagle.cli.main import main; main()"
    command = [sys.executable, "-c", code, "deploy", "smollm2-135m", *LOCAL, "--yes"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    line = "peagle serve smollm2-135m --engine native\n"
    assert done.stdout == f"{line}-m {line}"


@pytest.mark.parametrize("verb", ["status", "logs", "delete"])
def test_nothing_local_is_left_running(refused, verb: str) -> None:
    line = refused("deploy", verb, "smollm2-135m", *LOCAL, field="to")
    assert "Ctrl-C" in line


def test_a_sagemaker_dry_run_prints_json_and_needs_no_boto3() -> None:
    code = "import sys; sys.modules['boto3'] = None; from peagle.cli.main import main; main()"
    command = [sys.executable, "-c", code, "deploy", "gpt-oss-20b", *AWS, "--dry-run"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    sent = json.loads(done.stdout)
    operations = ["create_model", "create_endpoint_config", "create_endpoint"]
    assert [each["operation"] for each in sent] == operations
    assert done.stdout == invoke("deploy", "gpt-oss-20b", *AWS, "--dry-run").stdout
    scaled = json.loads(
        invoke("deploy", "gpt-oss-20b", *AWS, "--dry-run", "--max-replicas", 2).stdout
    )
    assert [each["operation"] for each in scaled[3:]] == [
        "register_scalable_target", "put_scaling_policy"
    ]  # fmt: skip


def test_sagemaker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sagemaker, "deploy", lambda spec, account, say: spec.resource)
    monkeypatch.setattr(sagemaker, "status", lambda name, region: {"endpoint": name})
    monkeypatch.setattr(sagemaker, "logs", lambda name, region, lines: [f"{lines} of {name}"])
    monkeypatch.setattr(sagemaker, "delete", lambda name, region: [f"endpoint {name}"])
    where = ("gpt-oss-20b", *THERE)
    assert "is in service" in invoke("deploy", "gpt-oss-20b", *AWS, "--yes").stdout
    assert json.loads(invoke("deploy", "status", *where).stdout)["endpoint"] == "peagle-gpt-oss-20b"
    assert invoke("deploy", "logs", *where, "--lines", 3).stdout == "3 of peagle-gpt-oss-20b\n"
    deleted = invoke("deploy", "delete", *where, "--yes").stdout
    assert deleted == "deleted endpoint peagle-gpt-oss-20b\n"


def test_a_dry_run_names_what_it_was_not_told() -> None:
    shown = invoke("deploy", "gpt-oss-20b", "--to", "sagemaker", "--dry-run")
    model, config, _ = json.loads(shown.stdout)
    assert model["parameters"]["ExecutionRoleArn"] == "ROLE_ARN"
    assert ".ecr.REGION.amazonaws.com" in model["parameters"]["PrimaryContainer"]["Image"]
    [variant] = config["parameters"]["ProductionVariants"]
    assert variant["InstanceType"] == "INSTANCE_TYPE"
    assert shown.stderr == (
        "placeholders, to be given when it starts: "
        "REGION (--region), ROLE_ARN (--role), INSTANCE_TYPE (--instance-type)\n"
    )
    some = invoke("deploy", "gpt-oss-20b", *THERE, "--role", ROLE, "--dry-run")
    assert some.stderr.endswith(": INSTANCE_TYPE (--instance-type)\n")
    assert invoke("deploy", "gpt-oss-20b", *AWS, "--dry-run").stderr == ""


def test_a_start_needs_role_and_instance_type(refused) -> None:
    refused("deploy", "gpt-oss-20b", *THERE, "--yes", field="role")
    where = (*THERE, "--role", ROLE)
    refused("deploy", "gpt-oss-20b", *where, "--yes", field="instance_type")


def test_a_hub_id_is_deployed_as_its_entry() -> None:
    by_name, by_hub_id = (
        json.loads(invoke("deploy", name, *AWS, "--dry-run").stdout)[0]["parameters"]
        for name in ("gpt-oss-20b", "openai/gpt-oss-20b")
    )
    assert by_hub_id["ModelName"].startswith("peagle-openai-gpt-oss-20b-")
    theirs = by_hub_id["PrimaryContainer"]["Environment"]
    assert theirs.pop("SM_VLLM_SERVED_MODEL_NAME") == "openai/gpt-oss-20b"
    ours = by_name["PrimaryContainer"]["Environment"]
    assert ours.pop("SM_VLLM_SERVED_MODEL_NAME") == "gpt-oss-20b"
    assert theirs == ours


def test_a_hub_id_that_no_entry_knows(refused) -> None:
    shown = invoke("deploy", "owner/model", *LOCAL)
    warning = "warning: owner/model has no head: nothing will draft; name one with --head\n"
    assert shown.stderr == warning
    assert shown.stdout == "peagle serve owner/model --engine native\n"
    headed = invoke("deploy", "owner/model", *LOCAL, "--head", "me/head", "--k", 4)
    assert headed.stderr == ""
    assert headed.stdout == "peagle serve owner/model --engine native --head me/head --k 4\n"
    assert "is not in the catalog" in refused("deploy", "./model", *LOCAL)


def test_the_public_head_drafts_where_there_is_no_other() -> None:
    shown = invoke("deploy", "gemma-4-31b", *LOCAL)
    assert " --head RedHatAI/gemma-4-31B-it-speculator.eagle3\n" in shown.stdout
    assert shown.stderr.startswith(
        "warning: gemma-4-31b has no p-eagle head: "
        "the public eagle3 head RedHatAI/gemma-4-31B-it-speculator.eagle3 drafts (source: https://"
    )


def test_a_profile_is_asked_for(refused) -> None:
    plain, profiled = (
        json.loads(invoke("deploy", "gpt-oss-20b", *AWS, "--dry-run", *more).stdout)
        for more in ((), ("--profile", "benchmark"))
    )
    added = {"SM_VLLM_STREAM_INTERVAL": "20", "SM_VLLM_NO_ENABLE_PREFIX_CACHING": "true"}
    plain_flags, flags = (
        sent[0]["parameters"]["PrimaryContainer"]["Environment"] for sent in (plain, profiled)
    )
    assert flags == plain_flags | added and not set(added) & set(plain_flags)
    local = (*LOCAL, "--dry-run", "--profile", "benchmark")
    assert "--engine" in refused("deploy", "gpt-oss-20b", *local, field="profile")


def test_bad_heads(refused, tmp_path: Path) -> None:
    for options, field in (
        (("--k", 0), "k"),
        (("--head", tmp_path), "head"),
        (("--head", "head"), "head"),
        (("--method", "medusa"), "method"),
    ):
        refused("deploy", "gpt-oss-20b", *AWS, "--dry-run", *options, field=field)


def test_bad_input(refused) -> None:
    assert "costs money" in refused("deploy", "gpt-oss-20b", *AWS)
    refused("deploy", "gpt-oss-20b", "--to", "sagemaker", field="region")
    refused("deploy", "gpt-oss-20b", *THERE, "--role", "me", field="role")
    refused("deploy", "smollm2-135m", *AWS, "--dry-run", field="image")
