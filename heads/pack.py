"""Store a head as int8 rows with scales: about half the bytes of bf16.

    python heads/pack.py runs/mine/head heads/mine

`peagle export heads/mine exported --to vllm` writes it in bf16 again, for vLLM.
"""

import sys
from pathlib import Path

import torch

from peagle.heads.format import read_head, state_dict_of
from peagle.heads.save import save_drafter
from peagle.methods.registry import method_of


def main() -> None:
    head, output = map(Path, sys.argv[1:])
    files = read_head(head)
    config = files.parse()
    drafter = method_of(config).build(config)
    drafter.load_state_dict(state_dict_of(files.tensors, config))
    save_drafter(drafter, output, dtype=torch.int8)


if __name__ == "__main__":
    main()
