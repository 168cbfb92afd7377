"""The real vLLM understands every command line and variable that `peagle deploy` makes, of all
entries, places, GPUs and profiles.

`make test-vllm` runs this; PEAGLE_VLLM_PYTHON names the interpreter. vLLM is started once for all
lines.
"""

import json
import subprocess
import warnings
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import yaml

from peagle.catalog import Entry, load_catalog
from peagle.deploy.data import facts
from peagle.deploy.kubernetes import rendered
from peagle.deploy.plan import Choices, Plan, make_plan
from peagle.errors import InputWarning

pytestmark = pytest.mark.vllm
ASK = """
import json, sys
from vllm import envs
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager
from vllm.utils.argparse_utils import FlexibleArgumentParser

def refuse(message):
    raise ValueError(message)

parser = make_arg_parser(FlexibleArgumentParser())
parser.error = refuse
asked = json.loads(sys.stdin.read())
told = []
for line in asked["lines"]:
    try:
        told.append(vars(parser.parse_args(line)))
    except (ValueError, SystemExit) as error:
        told.append({"error": str(error)})
unknown = [name for name in asked["variables"] if name not in envs.environment_variables]
json.dump({
    "parsed": told,
    "unknown": unknown,
    "tools": list(ToolParserManager.list_registered()),
    "reasoning": list(ReasoningParserManager.list_registered()),
}, sys.stdout, default=str)
"""


def plans() -> Iterator[tuple[Entry, Plan]]:
    known = {name: each for name, each in load_catalog().items() if isinstance(each.target, str)}
    everything = product(known, ("kubernetes", "sagemaker"), facts().gpus)
    for name, place, gpu in everything:
        profiles = [p for p in known[name].profiles if p == gpu or p not in facts().gpus]
        for method, profile in product(known[name].heads, (None, *profiles)):
            choices = Choices(gpu=gpu, method=method, profile=profile)
            yield known[name], make_plan(name, known[name], place, choices)


def of_the_pod(plan: Plan) -> list[str]:
    """The arguments in the plain manifests, which add some to the plan's."""
    text = rendered(plan, "manifests", "default", pinned=False)
    pod = next(yaml.safe_load_all(text))["spec"]["template"]["spec"]
    return list(pod["containers"][0]["command"][2:])


def ask(python: str, lines: list[list[str]], variables: list[str]) -> Any:
    given = json.dumps({"lines": lines, "variables": variables})
    command = [python, "-c", ASK]
    run = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


def test_vllm_understands_all_of_it(vllm_python: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InputWarning)
        made = list(plans())
    assert len(made) > 100
    pods = [of_the_pod(plan) for _, plan in made if plan.instance_type is None]
    variables = {name for _, plan in made for name in (*plan.env, plan.key_variable)}
    # What was wrong once shows that the check works.
    wrong = ["VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8"]
    told = ask(
        vllm_python,
        [*(list(plan.argv) for _, plan in made), *pods, ["model", "--no-such-flag"]],
        [*sorted(variables), *wrong],
    )
    assert told["unknown"] == wrong
    *parsed, refused = told["parsed"]
    assert "error" in refused
    assert not [each["error"] for each in parsed if "error" in each]
    for (entry, plan), found in zip(made, parsed, strict=False):
        assert (found["model_tag"], found["served_model_name"]) == (entry.target, [plan.name])
        speculative = json.loads(str(plan.options["speculative-config"]))
        assert found["speculative_config"] == speculative
        assert found["tensor_parallel_size"] == plan.gpus
        for option in ("max_model_len", "enable_prefix_caching", "async_scheduling",
                       "max_num_seqs", "max_cudagraph_capture_size"):  # fmt: skip
            assert found[option] == plan.options.get(option.replace("_", "-")), option
        assert found["tool_call_parser"] in told["tools"]
        reasoning = found["reasoning_parser"]
        assert not reasoning or reasoning in told["reasoning"]
    assert {found["shutdown_timeout"] for found in parsed[len(made) :]} == {100}
