"""Forms of Kubernetes against the schemas of the chart, of KServe and of Kubernetes itself.

PEAGLE_SCHEMAS is a folder with the first two: production-stack-values.schema.json
(vllm-project/production-stack, helm/values.schema.json) and
kserve-llminferenceservice-v1alpha2.schema.json (that version's schema of KServe's CRD).
"""

import json
import os
import shlex
import warnings
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from kubernetes_validate import validate
from refusals import refused
from stand_ins import entry

from peagle.catalog import Entry, find_entry, load_catalog
from peagle.deploy.kubernetes import command, rendered
from peagle.deploy.plan import Choices, Plan, make_plan
from peagle.errors import InputWarning

VERSIONS = ("1.27", "1.32", "1.37")
CHART = "production-stack-values.schema.json"
KSERVE = "kserve-llminferenceservice-v1alpha2.schema.json"
SERVED = [name for name, each in load_catalog().items() if isinstance(each.target, str)]
ODD = {"A": "1", "B": "it's: {x} # y $(A)", "C": "two\nlines"}


def plan(name: str = "gpt-oss-20b", of: Entry | None = None, **choices: Any) -> Plan:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InputWarning)
        return make_plan(name, of or find_entry(name), "kubernetes", Choices(**choices))


def printed(made: Plan, form: str, namespace: str = "default", *, pinned: bool = False) -> str:
    return rendered(made, form, namespace, pinned=pinned)


def read(made: Plan, form: str, *, pinned: bool = False) -> Any:
    """Values of the chart, KServe's object, or manifests by kind."""
    found = list(yaml.safe_load_all(printed(made, form, pinned=pinned)))
    return found[0] if form != "manifests" else {each["kind"]: each for each in found}


def schema(name: str) -> dict[str, Any]:
    folder = os.environ.get("PEAGLE_SCHEMAS")
    if not folder:
        pytest.skip(f"PEAGLE_SCHEMAS is not set: it names a folder with {name}")
    return dict(json.loads(Path(folder, name).read_text()))


def unknown(value: Any, known: dict[str, Any], path: str = "") -> list[str]:
    """Paths of keys that a schema does not list: the chart's lets every key pass."""
    if isinstance(value, list):
        items = known.get("items", {})
        return [found for each in value for found in unknown(each, items, path)]
    if not isinstance(value, dict) or "properties" not in known:
        return []
    found = []
    for key, each in value.items():
        if key in known["properties"]:
            found += unknown(each, known["properties"][key], f"{path}.{key}")
        else:
            found.append(f"{path}.{key}")
    return found


@pytest.mark.parametrize("name", SERVED)
def test_values_fit_the_chart(name: str) -> None:
    known = schema(CHART)
    for most, pinned in ((None, False), (4, True)):
        values = read(plan(name, max_replicas=most), "stack", pinned=pinned)
        jsonschema.validate(values, known)
        # The chart's templates read `pdb`, its schema has forgotten it; two mappings are free.
        free = ("modelSpec.pdb", "labels.", "containerSecurityContext.")
        found = [path.removeprefix(".servingEngineSpec.") for path in unknown(values, known)]
        assert not [path for path in found if not path.startswith(free)]


@pytest.mark.parametrize("name", SERVED)
def test_the_object_fits_kserve(name: str) -> None:
    known = schema(KSERVE)
    made = read(plan(name), "kserve", pinned=True)
    jsonschema.validate(made, known)
    assert not unknown(made["spec"], known["properties"]["spec"])


@pytest.mark.parametrize("name", load_catalog())
def test_manifests_fit_the_published_schemas(name: str) -> None:
    made = plan(name, image=None if name in SERVED else "owner/image:1")
    for manifest in read(made, "manifests", pinned=True).values():
        for version in VERSIONS:
            validate(manifest, version, strict=True)


def test_a_misspelt_field_fails_the_tests_above() -> None:
    policy = read(plan(), "manifests")["NetworkPolicy"]
    policy["spec"]["policyType"] = policy["spec"].pop("policyTypes")
    with pytest.raises(Exception, match="policyType"):
        validate(policy, VERSIONS[0], strict=True)
    assert unknown({"a": [{"x": 1}]}, {"properties": {"a": {"items": {"properties": {}}}}}) == [
        ".a.x"
    ]


def served(made: Plan, form: Any) -> list[str]:
    """vLLM's arguments after the model, as the form has them."""
    found = read(made, form)
    if form == "stack":
        [model] = found["servingEngineSpec"]["modelSpec"]
        return list(model["vllmConfig"]["extraArgs"])
    if form == "kserve":
        [container] = found["spec"]["template"]["containers"]
        return shlex.split(container["env"][0]["value"])
    [container] = found["Deployment"]["spec"]["template"]["spec"]["containers"]
    return list(container["command"][3:])


@pytest.mark.parametrize("form", ["stack", "kserve", "manifests"])
def test_a_form_says_all_of_a_plan(form: str) -> None:
    odd = entry(vllm_env=ODD, vllm_flags={"chat-template": ODD["B"]}, gpu_memory=100)
    made = plan("mine", odd, profile=None)
    line = served(made, form)
    for value in (ODD["B"], made.options["speculative-config"]):
        assert value in line
    everything = printed(made, form)
    assert "owner/model" in everything and "peagle-mine-api-key" in everything
    for name, value in ODD.items():
        assert {"name": name, "value": value} in _environment(read(made, form))
    if form != "manifests":
        assert "--tensor-parallel-size" not in line, "a field of the form's own"


def _environment(found: Any) -> list[Any]:
    """All lists under a key `env`."""
    if isinstance(found, list):
        return [each for value in found for each in _environment(value)]
    if not isinstance(found, dict):
        return []
    inner = [each for value in found.values() for each in _environment(value)]
    return [*found.get("env", []), *inner]


def test_running_answers_are_finished() -> None:
    """Within the grace period: preStop and vLLM's own timeout."""
    pod = read(plan(), "manifests")["Deployment"]["spec"]["template"]["spec"]
    [container] = pod["containers"]
    line = container["command"]
    seconds = int(line[line.index("--shutdown-timeout") + 1])
    sleep = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert seconds + sleep < pod["terminationGracePeriodSeconds"]
    line = served(plan(), "stack")
    assert int(line[line.index("--shutdown-timeout") + 1]) < 30, "Kubernetes' own grace period"
    assert "--shutdown-timeout" not in served(plan(), "kserve"), "KServe sets it"
    with refused("image"):
        plan("qwen3-8b", image="mine:v0.17.2", method="eagle3")  # 0.18 is the first that has it


def test_a_slow_first_start_is_no_failure() -> None:
    """Kubernetes gives a roll-out up after ten minutes, unless told otherwise."""
    deployment = read(plan(), "manifests")["Deployment"]["spec"]
    probe = deployment["template"]["spec"]["containers"][0]["startupProbe"]
    seconds = probe["periodSeconds"] * probe["failureThreshold"]
    assert deployment["progressDeadlineSeconds"] > seconds


def test_no_pod_waits_for_a_volume() -> None:
    for form in ("stack", "kserve", "manifests"):
        text = printed(plan(replicas=2), form).lower()
        assert "persistentvolume" not in text and "pvc" not in text


def test_gated_weights_are_downloaded_with_the_token() -> None:
    """KServe downloads in a container of its own, which sees no variable of the main one."""
    template = read(plan("llama-3.1-8b"), "kserve")["spec"]["template"]
    for container in (*template["initContainers"], *template["containers"]):
        token = [each for each in container["env"] if each["name"] == "HF_TOKEN"]
        assert token[0]["valueFrom"]["secretKeyRef"]["name"] == "hf-token"
    assert template["initContainers"][0]["name"] == "storage-initializer"
    for form in ("stack", "manifests"):
        assert "HF_TOKEN" in {each["name"] for each in _environment(read(plan(), form))}


def resources(made: Plan, form: str) -> tuple[dict[str, Any], str]:
    """Limits, and the requested memory."""
    found = read(made, form)
    if form == "stack":
        [model] = found["servingEngineSpec"]["modelSpec"]
        limits = {name: value for name, value in model.items() if name.startswith("limit")}
        return limits, model["requestMemory"]
    manifest = found if form == "kserve" else found["Deployment"]
    template = manifest["spec"]["template"]
    [container] = template.get("spec", template)["containers"]
    return container["resources"]["limits"], container["resources"]["requests"]["memory"]


@pytest.mark.parametrize("form", ["stack", "kserve", "manifests"])
def test_nothing_is_throttled_and_memory_follows_the_gpus(form: str) -> None:
    gpus = {} if form == "stack" else {"nvidia.com/gpu": "1"}
    assert resources(plan(), form) == (gpus, "32Gi")
    assert resources(plan("gemma-4-31b", gpu="h100"), form)[1] == "64Gi"


def test_the_stack_caches_prefixes_unless_told_otherwise() -> None:
    """Without the field the chart turns vLLM's default off."""
    for profile, cached in ((None, True), ("benchmark", False)):
        [model] = read(plan(profile=profile), "stack")["servingEngineSpec"]["modelSpec"]
        assert model["vllmConfig"]["enablePrefixCaching"] is cached
        assert "prefix" not in " ".join(model["vllmConfig"]["extraArgs"])


def test_an_update_keeps_the_capacity() -> None:
    values = read(plan(), "stack")["servingEngineSpec"]
    manifests = read(plan(), "manifests")["Deployment"]["spec"]
    for found in (values, manifests):
        assert found["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}


def test_who_reaches_vllm() -> None:
    """Its key guards /v1 only: the stack's router, else the namespace, and Prometheus."""
    [policy] = read(plan(), "stack")["extraObjects"]
    [rule] = policy["spec"]["ingress"]
    assert rule["from"][0]["podSelector"]["matchLabels"] == {
        "app.kubernetes.io/instance": "peagle-gpt-oss-20b", "app.kubernetes.io/component": "router"
    }  # fmt: skip
    found = read(plan(), "manifests")
    labels = found["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert found["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
    assert found["Service"]["spec"]["selector"] == labels
    assert found["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == labels


def test_nodes_with_the_named_gpu() -> None:
    for form in ("stack", "kserve", "manifests"):
        assert "nvidia.com/gpu.memory" not in printed(plan(), form)
        assert "GPUs of type h100" in printed(plan(), form), "the guess is named"
        assert "nvidia.com/gpu.memory" in printed(plan(gpu="h200"), form, pinned=True)
    assert "driver 580" in printed(plan(), "stack")
    assert "driver 525" in printed(plan(image="vllm/vllm-openai:v0.29.0-cu129"), "stack")


def test_our_engine() -> None:
    ours = plan("smollm2-135m", image="mine:1")
    pod = read(ours, "manifests")["Deployment"]["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert container["image"] == "mine:1" and "limits" not in container["resources"]
    assert container["env"][0]["name"] == "PEAGLE_API_KEY"
    assert container["command"][:3] == ["peagle", "serve", "smollm2-135m"]
    for form in ("stack", "kserve", "compose"):
        with refused("form"):
            printed(ours, form)


def test_replicas() -> None:
    made = plan(replicas=2, max_replicas=3)
    [model] = read(made, "stack")["servingEngineSpec"]["modelSpec"]
    assert model["keda"]["minReplicaCount"] == 2 and model["keda"]["maxReplicaCount"] == 3
    monitor = read(made, "stack")["servingEngineSpec"]["serviceMonitor"]
    assert monitor["enabled"] and monitor["relabelings"][0]["targetLabel"] == "model"
    with refused("max_replicas"):
        printed(made, "kserve")


def test_names_fit_the_chart() -> None:
    [model] = read(plan("x" * 80, entry()), "stack")["servingEngineSpec"]["modelSpec"]
    service = f"{plan('x' * 80, entry()).resource}-{model['name']}-engine-service"
    assert len(service) <= 63


def test_the_command_and_those_that_manage_it() -> None:
    start = command(plan(), "stack", "llm")
    assert start[:4] == ["helm", "upgrade", "--install", "peagle-gpt-oss-20b"]
    assert " ".join(start[-4:]) == "-n llm -f -" and "vllm-stack" in start
    assert command(plan(), "manifests", "llm") == ["kubectl", "apply", "-f", "-"]
    for form in ("stack", "kserve", "manifests"):
        above, _, _ = printed(plan(), form, "llm").partition("\napi")
        for verb in ("create secret", "get", "port-forward"):
            assert f"#   kubectl -n llm {verb} " in above
