"""Manifests against Kubernetes' published schemas; kubectl is a stand-in."""

from typing import Any

import pytest
import yaml
from kubernetes_validate import validate
from refusals import refused
from stand_ins import Kubectl, entry

from peagle.catalog import find_entry, load_catalog
from peagle.deploy import kubernetes
from peagle.deploy.kubernetes import Cluster
from peagle.deploy.spec import DeployFailed, Spec, make_spec

VERSIONS = ("1.27", "1.32", "1.37")


def spec(name: str = "gpt-oss-20b") -> Spec:
    return make_spec(name, find_entry(name), None, remote=True)


def applied(text: str) -> dict[str, Any]:
    """Manifests by kind."""
    return {manifest["kind"]: manifest for manifest in yaml.safe_load_all(text)}


def container(manifests: dict[str, Any]) -> dict[str, Any]:
    [only] = manifests["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert isinstance(only, dict)
    return only


@pytest.mark.parametrize("name", load_catalog())
def test_manifests_fit_the_published_schemas(name: str) -> None:
    secret = yaml.safe_load(kubernetes.secret(spec(name), Cluster()))
    others = kubernetes.dry_run(spec(name), Cluster(image="owner/image:1"))
    for manifest in (secret, *yaml.safe_load_all(others)):
        for version in VERSIONS:
            validate(manifest, version, strict=True)


def test_keys_differ() -> None:
    keys = {yaml.safe_load(kubernetes.secret(spec(), Cluster()))["stringData"]["api-key"]
            for _ in range(2)}  # fmt: skip
    assert len(keys) == 2 and min(map(len, keys)) > 40


def test_the_schemas_are_strict() -> None:
    """A misspelt field fails the validation of the test above."""
    volume = applied(kubernetes.dry_run(spec(), Cluster()))["PersistentVolumeClaim"]
    volume["spec"]["accessMode"] = volume["spec"].pop("accessModes")
    with pytest.raises(Exception, match="accessMode"):
        validate(volume, VERSIONS[0], strict=True)


def test_everything_is_tied_together() -> None:
    found = applied(kubernetes.dry_run(spec(), Cluster("models")))
    assert list(found) == [
        "PersistentVolumeClaim", "Service", "Deployment", "HorizontalPodAutoscaler"
    ]  # fmt: skip
    assert {manifest["metadata"]["namespace"] for manifest in found.values()} == {"models"}
    deployment = found["Deployment"]["spec"]
    labels = deployment["template"]["metadata"]["labels"]
    assert found["Service"]["spec"]["selector"] == labels
    assert deployment["selector"]["matchLabels"] == labels
    pod, name = deployment["template"]["spec"], found["Deployment"]["metadata"]["name"]
    claim = pod["volumes"][0]["persistentVolumeClaim"]["claimName"]
    assert claim == found["PersistentVolumeClaim"]["metadata"]["name"]
    scaler = found["HorizontalPodAutoscaler"]["spec"]
    assert scaler["scaleTargetRef"]["name"] == name
    assert "replicas" not in deployment  # the autoscaler's
    assert scaler["metrics"][0]["pods"]["metric"]["name"] == "vllm_num_requests_waiting"


def test_the_container() -> None:
    found = applied(kubernetes.dry_run(spec(), Cluster()))
    pod, only = found["Deployment"]["spec"]["template"]["spec"], container(found)
    assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] > 0
    assert only["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert not only["securityContext"]["allowPrivilegeEscalation"]
    assert only["resources"]["limits"]["nvidia.com/gpu"] == "1"
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert only[probe]["httpGet"] == {"path": "/health", "port": "http"}
    environment = {each["name"]: each for each in only["env"]}
    secret = environment["VLLM_API_KEY"]["valueFrom"]["secretKeyRef"]
    assert secret == {"name": "peagle-gpt-oss-20b-api-key", "key": "api-key"}
    assert environment["VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8"]["value"] == "1"
    assert only["command"][:3] == ["vllm", "serve", "openai/gpt-oss-20b"]


def test_our_engine_on_a_cpu_needs_an_image() -> None:
    with refused("image"):
        kubernetes.dry_run(spec("smollm2-135m"), Cluster())
    only = container(applied(kubernetes.dry_run(spec("smollm2-135m"), Cluster(image="mine:1"))))
    assert only["image"] == "mine:1" and "nvidia.com/gpu" not in only["resources"]["limits"]
    assert only["env"][0]["name"] == "PEAGLE_API_KEY"


def test_values_are_quoted_for_yaml() -> None:
    odd = {"A": "1", "B": "it's: {x} # y", "C": "two\nlines"}
    mine = make_spec("mine", entry(vllm_env=odd), None, remote=True)
    found = applied(kubernetes.dry_run(mine, Cluster("on", image="a: b")))
    assert found["Service"]["metadata"]["namespace"] == "on"
    assert container(found)["image"] == "a: b"
    assert container(found)["command"] == mine.command("0.0.0.0", kubernetes.PORT)
    environment = {each["name"]: each.get("value") for each in container(found)["env"]}
    assert odd.items() <= environment.items()


def test_one_replica_needs_no_shared_volume() -> None:
    def modes(cluster: Cluster) -> list[str]:
        claim = applied(kubernetes.dry_run(spec(), cluster))["PersistentVolumeClaim"]
        return list(claim["spec"]["accessModes"])

    assert modes(Cluster(max_replicas=1)) == ["ReadWriteOnce"]
    assert modes(Cluster(max_replicas=2)) == ["ReadWriteMany"]


def test_replicas_are_checked() -> None:
    with refused("replicas"):
        Cluster(replicas=3, max_replicas=2)


def test_apply_makes_the_key_once_and_never_on_a_command_line(kubectl: Kubectl) -> None:
    cluster = Cluster("models", context="test")
    kubernetes.apply(spec(), cluster)
    look, make, rest = kubectl.calls
    common = ["--context", "test", "--namespace", "models"]
    assert look[0][:6] == [*common, "get", "secret"]
    assert make[0] == rest[0] == [*common, "apply", "-f", "-"]
    key = yaml.safe_load(make[1])["stringData"]["api-key"]
    assert key.startswith("sk-") and key not in str([call[0] for call in kubectl.calls])
    assert "Secret" not in applied(rest[1])
    kubectl.answer(get=(0, "secret/peagle-gpt-oss-20b-api-key\n", ""))
    kubernetes.apply(spec(), cluster)
    assert len(kubectl.calls) == 5  # the key that is there is kept


def test_a_refusal_of_kubectl(kubectl: Kubectl) -> None:
    kubectl.answer(apply=(1, "", "Error from server (Forbidden): no\nmore"))
    with pytest.raises(
        DeployFailed, match=r"kubectl apply ended with code 1: .*\(Forbidden\): no$"
    ):
        kubernetes.apply(spec(), Cluster())


def test_nothing_there(kubectl: Kubectl) -> None:
    kubectl.answer(delete=(0, "", "No resources found"))
    for verb in (kubernetes.status, kubernetes.delete):
        assert verb("peagle-mine", Cluster()) == "nothing called peagle-mine in namespace default\n"


def test_delete_takes_what_carries_the_label_and_nothing_else(kubectl: Kubectl) -> None:
    kubernetes.delete("peagle-mine", Cluster())
    [(arguments, _)] = kubectl.calls
    selector = "app.kubernetes.io/name=peagle,app.kubernetes.io/instance=peagle-mine"
    assert arguments[-4:] == ["delete", "deployment,service,hpa,secret,pvc", "-l", selector]
    mine = make_spec("mine", entry(), None, remote=True)
    for manifest in applied(kubernetes.dry_run(mine, Cluster())).values():
        labels = manifest["metadata"]["labels"]
        assert {"app.kubernetes.io/instance": "peagle-mine"}.items() <= labels.items()
