"""The real vLLM understands the command lines that catalog entries are deployed with.

`make test-vllm` runs this; PEAGLE_VLLM_PYTHON names the interpreter.
"""

import json
import os
import subprocess

import pytest

from peagle.catalog import load_catalog
from peagle.deploy.spec import make_spec

pytestmark = pytest.mark.vllm
PARSE = """
import json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = make_arg_parser(FlexibleArgumentParser())
names = ["model_tag", "served_model_name", "speculative_config", "max_model_len", "port",
         "enable_prefix_caching", "async_scheduling"]
lines = json.loads(sys.argv[1])
parsed = {name: vars(parser.parse_args(line)) for name, line in lines.items()}
print(json.dumps({name: {each: found[each] for each in names} for name, found in parsed.items()}))
"""


def test_command_lines_mean_what_the_catalog_says() -> None:
    python = os.environ.get("PEAGLE_VLLM_PYTHON")
    if not python:
        pytest.skip("PEAGLE_VLLM_PYTHON is not set: `make test-vllm` sets vLLM up and sets it")
    entries = {name: each for name, each in load_catalog().items() if isinstance(each.target, str)}
    specs = {name: make_spec(name, each, "vllm", remote=True) for name, each in entries.items()}
    lines = {name: spec.command("0.0.0.0", 8000)[2:] for name, spec in specs.items()}
    run = subprocess.run(
        [python, "-c", PARSE, json.dumps(lines)], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    for name, found in json.loads(run.stdout.splitlines()[-1]).items():
        flags = entries[name].vllm_flags
        assert (found["model_tag"], found["port"]) == (entries[name].target, 8000)
        assert found["served_model_name"] == [name]
        assert found["speculative_config"] == specs[name].speculative
        for option in ("max_model_len", "enable_prefix_caching", "async_scheduling"):
            assert found[option] == flags.get(option.replace("_", "-")), option
