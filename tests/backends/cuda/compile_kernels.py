"""Compiles the GPU's attention for GPUs that need not be here, and prints of each kernel what it is
for, its bytes of shared memory, and the bytes of registers a thread had to spill."""

import re
import subprocess
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from peagle.backends.cuda import attention
from peagle.model.attention import AttentionSpec

TYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16"}
KINDS = {
    "scale": "fp32", "softcap": "fp32", "window": "i32", "tokens": "i32", "requests": "i32",
    "positions": "*i64", "query_starts": "*i64", "seq_lens": "*i64", "first_blocks": "*i64",
    "longest_tail": "*i64", "tables": "*i64",
}  # fmt: skip
SINKS = torch.empty(1, device="meta")
CASES = [  # compute capability, dtype, query heads, key heads, head size, tokens of a request, ...
    (80, torch.bfloat16, 9, 3, 64, 4, AttentionSpec(1.0), 8),
    (80, torch.float32, 16, 4, 256, 500, AttentionSpec(1.0, 128, 30.0), 1),
    (89, torch.bfloat16, 32, 8, 128, 500, AttentionSpec(1.0), 1),
    (89, torch.bfloat16, 16, 8, 256, 500, AttentionSpec(1.0, 1024), 2),
    (89, torch.float32, 32, 8, 128, 500, AttentionSpec(1.0), 2),
    (90, torch.bfloat16, 9, 3, 64, 1, AttentionSpec(1.0), 32),
    (90, torch.bfloat16, 64, 8, 64, 8, AttentionSpec(1.0, 128, None, SINKS), 4),
    (90, torch.bfloat16, 32, 4, 128, 500, AttentionSpec(1.0), 1),
    (90, torch.bfloat16, 32, 4, 512, 500, AttentionSpec(1.0), 1),
    (90, torch.float32, 32, 4, 128, 8, AttentionSpec(1.0), 16),
]
TREES = [
    (80, torch.bfloat16, 9, 3, 64, 13, AttentionSpec(1.0), 8),
    (80, torch.float32, 16, 4, 256, 41, AttentionSpec(1.0, 128, 30.0), 1),
    (89, torch.bfloat16, 32, 8, 128, 41, AttentionSpec(1.0), 2),
    (90, torch.bfloat16, 64, 8, 64, 13, AttentionSpec(1.0, 128, None, SINKS), 4),
    (90, torch.float32, 32, 4, 128, 8, AttentionSpec(1.0), 1),
]


def compile_for(  # noqa: PLR0913, PLR0917
    capability, dtype, heads, kv_heads, size, tokens, spec, splits, *, trees
):
    q = torch.empty(tokens, heads, size, dtype=dtype, device="meta")
    keys = torch.empty(8, 16, kv_heads, size, dtype=dtype, device="meta")
    launch = attention.Launch(attention.program_rows(tokens, q, keys, keys), splits, trees)
    known = attention.constants(q, keys, keys, spec, launch)
    options = {name: known.pop(name) for name in ("num_warps", "num_stages")}
    kinds = dict(KINDS)
    if splits > 1:
        kinds |= dict.fromkeys(("sums", "peaks"), "*fp32")
    made = machine_code(attention._attend, TYPES[dtype], kinds, known, options, capability)
    print(f"sm_{capability}", TYPES[dtype][1:], made.metadata.shared, spilled(made.asm["cubin"]))
    if splits > 1:
        kinds |= {"heads": "i32"}
        machine_code(attention._add_splits, TYPES[dtype], kinds, known, {}, capability)


def machine_code(kernel, tensors, kinds, known, options, capability):  # noqa: PLR0913, PLR0917
    """A kernel, whose arguments are `tensors` where nothing else is said."""
    names = kernel.arg_names
    known = {name: known[name] for name in names if name in known}
    kinds = dict.fromkeys(names, tensors) | {name: kinds[name] for name in names if name in kinds}
    kinds |= dict.fromkeys(known, "constexpr")
    aligned = {}  # tables are views, of which only some begin at a multiple of 16 bytes
    for index, (name, kind) in enumerate(kinds.items()):
        if kind[0] == "*" and name not in KINDS:
            aligned[index,] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, kinds, known, aligned)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def spilled(code: bytes) -> int:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        command = [tool, "--dump-resource-usage", file.name]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return sum(int(found) for found in re.findall(r"(?:STACK|LOCAL):(\d+)", printed))


if __name__ == "__main__":
    for case in CASES:
        compile_for(*case, trees=False)
    for case in TREES:
        compile_for(*case, trees=True)
