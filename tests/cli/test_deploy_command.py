"""`peagle deploy --to local` and `--to sagemaker`: what is printed and refused."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from runner import invoke

from peagle.deploy import local, sagemaker

SERVER = Path(__file__).parents[1] / "deploy" / "fake_server.py"
ROLE = "arn:aws:iam::123456789012:role/peagle"
THERE = ("--to", "sagemaker", "--region", "us-west-2")
AWS = (*THERE, "--role", ROLE, "--instance-type", "ml.p5.4xlarge")
LOCAL = ("--to", "local")


@pytest.fixture(autouse=True)
def nothing_of_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEAGLE_HOME", str(tmp_path))
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "PEAGLE_CATALOG"):
        monkeypatch.delenv(name, raising=False)


def test_local(monkeypatch: pytest.MonkeyPatch) -> None:
    def stand_in(_: object, port: int) -> list[str]:
        return [sys.executable, str(SERVER), str(port), "healthy"]

    monkeypatch.setattr(local, "command", stand_in)
    shown = invoke("deploy", "smollm2-135m", *LOCAL, "--port", 0).stdout
    said = dict(line.split(": ") for line in shown.splitlines())
    assert said["url"].endswith("/v1") and said["key"].startswith("sk-")
    assert said["model"] == "smollm2-135m"
    again = invoke("deploy", "smollm2-135m", *LOCAL)
    assert (again.stdout, again.stderr) == (shown, "smollm2-135m is running already\n")
    status = json.loads(invoke("deploy", "status", "smollm2-135m", *LOCAL).stdout)
    assert status["status"] == "healthy"
    assert "asked smollm2-135m user\n" in invoke("deploy", "logs", "smollm2-135m", *LOCAL).stdout
    assert invoke("deploy", "delete", "smollm2-135m", *LOCAL).stdout == "stopped\n"
    assert invoke("deploy", "delete", "smollm2-135m", *LOCAL).stdout == "was not running\n"


def test_local_dry_run(tmp_path: Path) -> None:
    shown = json.loads(invoke("deploy", "smollm2-135m", *LOCAL, "--dry-run").stdout)
    assert shown["command"][2:5] == ["peagle", "serve", "smollm2-135m"]
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump({"mine": {"target": "owner/model", "heads": {}}}))
    own = invoke("deploy", "mine", *LOCAL, "--catalog", file, "--dry-run").stdout
    assert json.loads(own)["environment"] == {"PEAGLE_CATALOG": str(file)}


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
    assert "--role ''" in refused("deploy", "gpt-oss-20b", *THERE, "--yes")
    line = refused("deploy", "gpt-oss-20b", *THERE, "--role", ROLE, "--yes")
    assert "--instance-type ''" in line


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
    shown = invoke("deploy", "owner/model", *LOCAL, "--dry-run")
    warning = "warning: owner/model has no head: nothing will draft; name one with --head\n"
    assert shown.stderr == warning
    assert json.loads(shown.stdout)["command"][3:5] == ["serve", "owner/model"]
    assert "--head" not in json.loads(shown.stdout)["command"]
    headed = invoke("deploy", "owner/model", *LOCAL, "--dry-run", "--head", "me/head", "--k", 4)
    assert headed.stderr == ""
    assert " serve owner/model --head me/head --k 4 " in " ".join(
        json.loads(headed.stdout)["command"]
    )
    assert "is not in the catalog" in refused("deploy", "./model", *LOCAL, "--dry-run")


def test_the_public_head_drafts_where_there_is_no_other() -> None:
    shown = invoke("deploy", "gemma-4-31b", *LOCAL, "--dry-run")
    assert "RedHatAI/gemma-4-31B-it-speculator.eagle3" in json.loads(shown.stdout)["command"]
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
    line = refused("deploy", "gpt-oss-20b", *LOCAL, "--dry-run", "--profile", "benchmark")
    assert line == "peagle: --profile benchmark: profiles are flags of vLLM: use --engine vllm"


def test_bad_heads(refused, tmp_path: Path) -> None:
    for options, why in (
        (("--k", 0), "--k 0: must be at least 1"),
        (("--head", tmp_path), f"--head {tmp_path}: a folder is read on this machine only"),
        (("--head", "head"), "--head head: no such folder, and no hub id"),
        (("--method", "medusa"), "--method 'medusa': choose p-eagle or eagle3"),
    ):
        assert why in refused("deploy", "gpt-oss-20b", *AWS, "--dry-run", *options)


def test_bad_input(refused) -> None:
    assert "costs money: nobody can be asked" in refused("deploy", "gpt-oss-20b", *AWS)
    assert "--region is missing" in refused("deploy", "gpt-oss-20b", "--to", "sagemaker")
    assert "--role 'me'" in refused("deploy", "gpt-oss-20b", *THERE, "--role", "me")
    native = refused("deploy", "smollm2-135m", *AWS, "--dry-run")
    assert "--image is missing: no image of peagle is published" in native
