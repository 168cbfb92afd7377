"""The stack's template: read by cfn-lint, by botocore's models and by the containers."""

import json
import re
from dataclasses import replace
from typing import Any

import boto3
import pytest
import yaml
from aws_container import flags
from botocore.session import Session
from cfnlint.api import lint
from cfnlint.config import ManualArgs
from moto import mock_aws
from refusals import refused

from peagle.catalog import PackagedGGUF, find_entry, load_catalog
from peagle.deploy.container import command
from peagle.deploy.data import facts
from peagle.deploy.plan import Choices, Plan, make_plan
from peagle.deploy.sagemaker import Account, template

REGION = "us-west-2"
ROLE = "arn:aws:iam::123456789012:role/mine"
KEY = "arn:aws:kms:us-west-2:123456789012:key/mine"
OURS = "123456789012.dkr.ecr.us-west-2.amazonaws.com/peagle:cpu"
TARGET = "s3://weights/qwen/"
FULL = {
    "weights": TARGET,
    "subnets": ("subnet-0123456789abcdef0", "subnet-0123456789abcdef1"),
    "security_groups": ("sg-0123456789abcdef0",),
    "kms_key": KEY,
    "token_secret": "hub-token",
}
REGIONS = ["us-west-2", "us-east-1", "eu-central-1"]

pytestmark = pytest.mark.filterwarnings("ignore::peagle.errors.InputWarning")


def plan(name: str = "gpt-oss-20b", **choices: Any) -> Plan:
    entry = find_entry(name)
    if isinstance(entry.target, PackagedGGUF):
        choices = {"image": OURS, **choices}
    return make_plan(name, entry, "sagemaker", Choices(**choices))


def resources(wanted: Plan | None = None, **account: Any) -> dict[str, Any]:
    """Properties of the stack's resources by their names."""
    content = yaml.safe_load(template(wanted or plan(), Account(**account)))
    return {name: each["Properties"] for name, each in content["Resources"].items()}


def variant(found: dict[str, Any]) -> dict[str, Any]:
    [only] = found["EndpointConfig"]["ProductionVariants"]
    return dict(only)


def environment(plan: Plan, **account: Any) -> dict[str, str]:
    container = resources(plan, **account)["Model"]["PrimaryContainer"]
    return dict(container["Environment"])


def statements(plan: Plan, **account: Any) -> list[dict[str, Any]]:
    [policy] = resources(plan, **account)["Role"]["Policies"]
    return list(policy["PolicyDocument"]["Statement"])


def faults(text: str) -> list[str]:
    found = lint(text, config=ManualArgs(regions=REGIONS))
    return [f"{each.rule.id} {each.message}" for each in found]


@pytest.mark.parametrize("name", load_catalog())
def test_cfn_lint_accepts_every_entry(name: str) -> None:
    for account, replicas in (({}, 1), ({"role": ROLE}, 1), (FULL, 2)):
        most = None if replicas == 1 else 4
        text = template(plan(name, replicas=replicas, max_replicas=most), Account(**account))
        assert faults(text) == []
        assert len(text) < 51_200  # CloudFormation's limit


@pytest.mark.parametrize("name", load_catalog())
def test_the_container_reads_the_options_of_the_plan(name: str) -> None:
    """By AWS's rules, from variables that SageMaker takes: of 1,024 bytes at most."""
    wanted, sent = plan(name), environment(plan(name))
    assert all(len(text) <= 1024 for text in sent.values())
    assert wanted.env.items() <= sent.items()
    if wanted.engine == "native":
        assert command(sent)[-len(wanted.argv) :] == [*wanted.argv]
        return
    read = flags(sent)
    assert read.pop("model") == [wanted.model]
    [seconds] = read.pop("shutdown-timeout")
    assert int(seconds) < 30, "SageMaker's time from SIGTERM to SIGKILL"
    for option, value in wanted.options.items():
        written = [] if isinstance(value, bool) else [str(value)]
        assert read.pop(f"no-{option}" if value is False else option) == written
    assert not read


@pytest.mark.parametrize("name", load_catalog())
def test_instances_and_drivers_are_known_to_aws(name: str) -> None:
    """boto3 has the names; the drivers are those of the image's CUDA."""
    shapes = Session().get_service_model("sagemaker")
    wanted = plan(name)
    found = variant(resources(wanted))
    kinds = shapes.shape_for("ProductionVariantInstanceType").enum
    assert found["InstanceType"] == wanted.instance_type in kinds
    if wanted.gpus:
        amis = shapes.shape_for("ProductionVariantInferenceAmiVersion").enum
        assert found["InferenceAmiVersion"] in amis
        assert found["InferenceAmiVersion"] == facts().cuda[str(wanted.cuda).partition(".")[0]].ami
    else:
        assert "InferenceAmiVersion" not in found


def test_images_of_every_region() -> None:
    """Each has its account and, by AWS::URLSuffix, its domain."""
    content = yaml.safe_load(template(plan(), Account()))
    accounts = content["Mappings"]["Registries"]
    assert accounts["us-west-2"] == {"Account": "763104351884"}
    assert accounts["af-south-1"] == {"Account": "626614931356"}
    assert accounts["cn-north-1"] == {"Account": "727897471807"}
    image = content["Resources"]["Model"]["Properties"]["PrimaryContainer"]["Image"]["Fn::Sub"]
    assert image[0] == "${Account}.dkr.ecr.${AWS::Region}.${AWS::URLSuffix}/" + str(plan().image)
    [registry] = image[1].values()
    assert registry["Fn::FindInMap"] == ["Registries", {"Ref": "AWS::Region"}, "Account"]
    arns = re.findall(r"\barn:\S+", json.dumps(content["Resources"]))
    assert arns and all(arn.startswith("arn:${AWS::Partition}:") for arn in arns)


def test_requests_go_to_the_instance_with_the_fewest() -> None:
    routing = variant(resources())["RoutingConfig"]
    assert routing == {"RoutingStrategy": "LEAST_OUTSTANDING_REQUESTS"}


def test_an_image_of_ones_own() -> None:
    own = replace(plan(), image=OURS)
    text = template(own, Account())
    assert "Mappings" not in yaml.safe_load(text)
    assert resources(own)["Model"]["PrimaryContainer"]["Image"] == OURS
    pulled = [each for each in statements(own) if "ecr:BatchGetImage" in each["Action"]]
    repository = "arn:${AWS::Partition}:ecr:us-west-2:123456789012:repository/peagle"
    assert [each["Resource"] for each in pulled] == [{"Fn::Sub": repository}]
    for elsewhere in ("mine:1", "vllm/vllm-openai:v0.32.0"):
        with refused("image"):
            template(replace(own, image=elsewhere), Account())


def placed(weights: str | None, head: str | None) -> tuple[str, str | None, Any, bool]:
    """The target and the head for vLLM, the folder on S3, and whether the network is off."""
    config = json.dumps({"method": "eagle3", "model": head}) if head else None
    options = {"revision": "main", **({"speculative-config": config} if config else {})}
    wanted = replace(plan(), head=head, options=options)
    model = resources(wanted, weights=weights)["Model"]
    container = model["PrimaryContainer"]
    sent = container["Environment"]
    assert ("SM_VLLM_REVISION" in sent) == (weights is None)
    drafting = json.loads(sent.get("SM_VLLM_SPECULATIVE_CONFIG", "{}")).get("model")
    source = container.get("ModelDataSource", {}).get("S3DataSource")
    isolated = model["EnableNetworkIsolation"]
    assert (sent.get("HF_HUB_OFFLINE") == "1") == isolated
    assert ("TIKTOKEN_ENCODINGS_BASE" in sent) == (weights is not None)
    return sent["SM_VLLM_MODEL"], drafting, source and source["S3Uri"], isolated


def test_weights_on_s3() -> None:
    hub, local = "openai/gpt-oss-20b", "/opt/ml/model"
    inside = f"{TARGET}heads/mine"
    assert placed(None, None) == (hub, None, None, False)
    assert placed(None, "owner/head") == (hub, "owner/head", None, False)
    assert placed(None, "s3://heads/mine") == (hub, local, "s3://heads/mine/", False)
    assert placed(TARGET, None) == (local, None, TARGET, True)
    assert placed(TARGET.rstrip("/"), "owner/head") == (local, "owner/head", TARGET, False)
    assert placed(TARGET, inside) == (local, f"{local}/heads/mine", TARGET, True)
    for outside in ("s3://heads/mine/", "s3://weights/qwen-head/"):
        with refused("head") as error:
            placed(TARGET, outside)
        assert f"{TARGET}head/" in str(error.value.fix)


def test_rights_are_named() -> None:
    """No action is a pattern; resources are, where AWS knows none for an action."""
    for account in ({}, FULL):
        for each in statements(plan(), **account):
            actions = each["Action"]
            names = [actions] if isinstance(actions, str) else actions
            assert not any("*" in name for name in names)
            services = {name.split(":")[0] for name in names}
            unlimited = ["ecr:GetAuthorizationToken", "cloudwatch:PutMetricData"]
            assert each["Resource"] != "*" or services == {"ec2"} or names == unlimited
    text = json.dumps(statements(plan()))
    assert "s3:" not in text and "kms:" not in text and "ec2:" not in text
    read = json.dumps(statements(plan(), weights=TARGET))
    assert "arn:${AWS::Partition}:s3:::weights/qwen/*" in read and "s3:Put" not in read
    assert "Role" not in resources(plan(), role=ROLE)
    assert resources(plan(), role=ROLE)["Model"]["ExecutionRoleArn"] == ROLE


def test_the_hubs_token_stays_in_secrets_manager() -> None:
    assert "HF_TOKEN" not in environment(plan())
    token = environment(plan(), token_secret="hub-token")["HF_TOKEN"]
    assert token == "{{resolve:secretsmanager:hub-token:SecretString}}"


def test_network_and_key() -> None:
    full = resources(plan(), **FULL)
    network = {"Subnets": [*FULL["subnets"]], "SecurityGroupIds": [*FULL["security_groups"]]}
    assert full["Model"]["VpcConfig"] == network
    assert full["EndpointConfig"]["KmsKeyId"] == KEY
    plain = resources(plan())
    assert "VpcConfig" not in plain["Model"] and "KmsKeyId" not in plain["EndpointConfig"]


def test_updates_that_an_alarm_undoes() -> None:
    """A batch of a rolling update is at most half of the instances: a single one is replaced."""
    for replicas, policy in ((1, "BlueGreenUpdatePolicy"), (2, "RollingUpdatePolicy")):
        found = resources(plan(replicas=replicas))
        deployment = found["Endpoint"]["DeploymentConfig"]
        assert [*deployment] == ["AutoRollbackConfiguration", policy]
        [alarm] = deployment["AutoRollbackConfiguration"]["Alarms"]
        watched = found[alarm["AlarmName"]["Ref"]]
        endpoint, *values = [each["Value"] for each in watched["Dimensions"]]
        assert endpoint == found["Endpoint"]["EndpointName"]
        config = {"Fn::GetAtt": ["EndpointConfig", "EndpointConfigName"]}  # of the new instances
        assert values == [variant(found)["VariantName"], config]
        waits = json.dumps(deployment[policy])
        assert f'"WaitIntervalInSeconds": {watched["EvaluationPeriods"] * 100}' in waits


def test_scaling() -> None:
    """AWS's service takes what the stack would register; moto's stacks have no scaling."""
    assert "ScalableTarget" not in resources(plan())
    found = resources(plan(load=100, max_replicas=3))
    target, policy = found["ScalableTarget"], dict(found["ScalingPolicy"])
    assert policy.pop("ScalingTargetId") == {"Ref": "ScalableTarget"}
    identity = {name: target[name] for name in ("ServiceNamespace", "ResourceId")}
    identity["ScalableDimension"] = target["ScalableDimension"]
    with mock_aws():
        keys = {"aws_access_key_id": "none", "aws_secret_access_key": "none"}
        client = boto3.client("application-autoscaling", region_name=REGION, **keys)
        client.register_scalable_target(**target)
        client.put_scaling_policy(**identity, **policy)
        [known] = client.describe_scalable_targets(ServiceNamespace="sagemaker")["ScalableTargets"]
        assert (known["MinCapacity"], known["MaxCapacity"]) == (1, 3)
        [put] = client.describe_scaling_policies(ServiceNamespace="sagemaker")["ScalingPolicies"]
    # Below the requests that vLLM takes at a time: above these they wait.
    tracked = put["TargetTrackingScalingPolicyConfiguration"]
    assert tracked["TargetValue"] == 75
    endpoint = found["Endpoint"]
    names = f"endpoint/{endpoint['EndpointName']}/variant/{variant(found)['VariantName']}"
    assert known["ResourceId"] == names
    assert endpoint["RetainAllVariantProperties"] is True
    assert resources(plan())["Endpoint"]["RetainAllVariantProperties"] is False


@pytest.mark.parametrize(
    ("name", "choices", "value"),
    [
        ("smollm2-135m", {}, 6),  # 8 on a CPU
        ("smollm2-135m", {"load": 32}, 24),
        ("qwen3-8b", {"engine": "native", "image": OURS}, 48),  # 64 on a GPU
        ("qwen3-8b", {}, 48),
    ],
)
def test_scaling_follows_the_batch_of_the_engine(
    name: str, choices: dict[str, Any], value: float
) -> None:
    policy = resources(plan(name, max_replicas=2, **choices))["ScalingPolicy"]
    assert policy["TargetTrackingScalingPolicyConfiguration"]["TargetValue"] == value


def test_alarms_on_the_containers_metrics() -> None:
    """CloudWatch scrapes them; every name is one that vLLM's dashboard has, too."""
    found = resources(plan())
    assert found["EndpointConfig"]["MetricsConfig"]["EnableDetailedObservability"] is True
    queries = {
        name: found[name]["EvaluationCriteria"]["PromQLCriteria"]["Query"]
        for name in ("Acceptance", "FirstToken")
    }
    endpoint = '{"aws.sagemaker.endpoint.name"="peagle-gpt-oss-20b"}'
    for query in queries.values():
        assert query.count("vllm:") == query.count(endpoint) > 0
    names = set(re.findall(r"vllm:\w+", " ".join(queries.values())))
    assert names == {
        "vllm:spec_decode_num_accepted_tokens_total",
        "vllm:spec_decode_num_drafts_total",
        "vllm:time_to_first_token_seconds",
    }
    content = yaml.safe_load(template(plan(), Account()))
    assert content["Resources"]["Acceptance"]["Condition"] == "PromQL"
    assert "Acceptance" not in resources(replace(plan(), head=None))


@pytest.mark.parametrize(
    ("field", "other"),
    [
        ("weights", {"weights": "/mnt/weights"}),
        ("weights", {"weights": "s3://bucket"}),
        ("subnets", {"subnets": ("subnet-0123456789abcdef0",)}),
        ("subnets", {"security_groups": ("sg-0123456789abcdef0",)}),
    ],
)
def test_bad_input(field: str, other: dict[str, Any]) -> None:
    with refused(field):
        template(plan(), Account(**other))


def test_a_region_without_an_image_of_vllm() -> None:
    """The template is the same for all others."""
    assert template(plan(), Account(), REGION) == template(plan(), Account())
    for region in ("moon-1", "us-gov-west-1"):
        with refused("region"):
            template(plan(), Account(), region)
