"""Every family of targets, from data to vLLM, with tiny random models.

    python benchmarks/families.py [--vllm-python .venv-vllm/bin/python] [--families llama gpt_oss]

For each family, the target answers prompts. A P-EAGLE head of the published layout (4 layers, a
draft vocabulary) is trained on the answers for 30 steps and exported for vLLM. The native engine
decodes with and without the head, and token ids are compared. vLLM decodes with the exported head;
its token ids and acceptance are compared with the native engine's. Everything is greedy and in
float32; the native engine is in the deterministic mode. Refusals of vLLM are recorded with their
message. Weights are random, so acceptance lengths only show that some drafts were accepted.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, environment, human_eval, write_json
from peers import PeerFailure, vllm_peer
from tokenizers import pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma4TextConfig,
    GptOssConfig,
    LlamaConfig,
    PretrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

sys.path.append(str(RESULTS.parents[1] / "tests"))
from tiny import CHATML, make_tokenizer  # noqa: E402

from peagle.cli.main import app  # noqa: E402
from peagle.engine.llm import LLM  # noqa: E402
from peagle.engine.params import SamplingParams  # noqa: E402
from peagle.engine.request import Stats  # noqa: E402
from peagle.engine.run import Completion  # noqa: E402
from peagle.heads.find import Head  # noqa: E402
from peagle.heads.load import load_drafter  # noqa: E402
from peagle.vllm.flags import speculative_config  # noqa: E402
from peagle.vllm.process import look  # noqa: E402
from peagle.vllm.serve import plan  # noqa: E402

VOCAB, WINDOW, STEPS, K, TOKENS = 384, 16, 30, 5, 48
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 8,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 1024, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 2,
    "tie_word_embeddings": False,
}  # fmt: skip
MIXED = ["sliding_attention", "full_attention"] * 4
EXPERTS = {"num_experts_per_tok": 2}
YARN = {
    "rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 256, "rope_theta": 10000.0,
}  # fmt: skip
FAMILIES: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: LlamaConfig(**SIZES),
    "qwen3": lambda: Qwen3Config(**SIZES),
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **SIZES, **EXPERTS, num_experts=4, moe_intermediate_size=32, norm_topk_prob=True
    ),
    "gpt_oss": lambda: GptOssConfig(
        **SIZES, **EXPERTS, num_local_experts=4, layer_types=list(MIXED), sliding_window=WINDOW,
        rope_parameters=YARN,
    ),
    "gemma4": lambda: Gemma4TextConfig(
        **SIZES | {"tie_word_embeddings": True}, layer_types=list(MIXED), sliding_window=WINDOW,
        global_head_dim=64, num_global_key_value_heads=1, attention_k_eq_v=True,
        num_kv_shared_layers=2, hidden_size_per_layer_input=16, vocab_size_per_layer_input=VOCAB,
        final_logit_softcapping=30.0,
    ),
}  # fmt: skip


def make_target(config: PretrainedConfig, folder: Path) -> None:
    """A random float32 model with a tokenizer, as a folder."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(torch.randn(weight.shape) * 0.15 + ("norm" in name))
    model.save_pretrained(folder)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer = make_tokenizer().train_new_from_iterator(
        human_eval(), VOCAB, initial_alphabet=alphabet
    )
    tokenizer.pad_token, tokenizer.chat_template = tokenizer.bos_token, CHATML
    tokenizer.save_pretrained(folder)


def peagle(*words: object) -> None:
    """Run a command of peagle in this process."""
    app([str(word) for word in words], standalone_mode=False)


def train(target: Path, folder: Path) -> dict[str, Any]:
    """A head in folder/run/head, and how its loss fell."""
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"turns": [q[-80:]]}) + "\n" for q in human_eval(24)))
    answers = folder / "answers.jsonl"
    peagle("data", "regenerate", target, "--prompts", prompts, "--output", answers,
           "--max-tokens", 32)  # fmt: skip
    peagle("train", target, "--data", answers, "--output", folder / "run", "--steps", STEPS,
           "--epochs", STEPS, "--layers", 4, "--depths", 8, "--draft-vocab", 256, "--lr", 2e-3,
           "--eval-every", 10 * STEPS)  # fmt: skip
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in lines]
    first, last = (sum(part) / len(part) for part in (losses[:5], losses[-5:]))
    return {"steps": len(losses), "loss_first": round(first, 4), "loss_last": round(last, 4)}


def export(head: Path, target: LLM, output: Path) -> dict[str, Any]:
    """Export the head for vLLM and read it back; report its layout and compare its weights."""
    peagle("export", head, output, "--to", "vllm", "--target", target.target.name)
    config = json.loads((output / "config.json").read_text())
    ours, back = (load_drafter(folder, target.target) for folder in (head, output))
    same = all(
        torch.equal(weight, back.state_dict()[name])
        for name, weight in ours.state_dict().items()
        if name in back.state_dict()
    )
    return {
        "architecture": config["architectures"][0],
        "layers": config["num_hidden_layers"],
        "draft_vocab_size": config["draft_vocab_size"],
        "mask_token": config["ptd_token_id"],
        "same_weights": same,
    }


def decode(llm: LLM, prompts: list[list[int]]) -> list[Completion]:
    return llm.generate(prompts, SamplingParams(max_tokens=TOKENS, ignore_eos=True))


def in_vllm(
    python: str, target: Path, head: Path, prompts: list[list[int]], ours: list[Completion]
) -> dict[str, Any]:
    """vLLM's ids and acceptance next to the native engine's, or vLLM's error."""
    drafter = Head(str(head), head, "p-eagle", K)
    _, flags = plan(look(Path(python)), drafter, AutoConfig.from_pretrained(target))
    start = {
        "model": str(target), "dtype": "float32", "max_num_seqs": 1, "max_model_len": 1024,
        "enforce_eager": True, "enable_prefix_caching": False,
        "disable_hybrid_kv_cache_manager": bool(flags),
    }  # fmt: skip
    request = {"prompts": prompts, "max_tokens": TOKENS, "ignore_eos": True}
    result: dict[str, Any] = {"flags": flags}
    by_head = speculative_config(True, str(head), K)
    for method, drafts in {"none": None, "p-eagle": by_head}.items():
        peer = vllm_peer(python, int(os.environ.get("OMP_NUM_THREADS", "1")))
        try:
            answer = peer.ask({**request, "start": {**start, "speculative_config": drafts}})
        except PeerFailure as failure:
            return {**result, "refused": {"method": method, "message": str(failure)}}
        finally:
            peer.close()
        pairs = zip(answer["token_ids"], ours, strict=True)
        result[method] = {
            "same": sum(theirs == mine.token_ids for theirs, mine in pairs),
            "acceptance_length": round(answer["acceptance_length"], 4),
        }
    return result


def family(name: str, folder: Path, vllm: str | None = None) -> dict[str, Any]:
    """Measure one row; all files are in `folder`."""
    target = folder / "target"
    make_target(FAMILIES[name](), target)
    trained = train(target, folder)
    llm = LLM(str(target), lookup=False, dtype="float32", deterministic=True)
    exported = export(folder / "run" / "head", llm, folder / "exported")
    prompts = [llm.tokenizer(q[-120:])["input_ids"] for q in human_eval(8)]
    alone = decode(llm, prompts)
    drafted = decode(llm.use(folder / "run" / "head", K), prompts)
    stats = sum((answer.stats for answer in drafted), Stats())
    same = sum(a.token_ids == b.token_ids for a, b in zip(alone, drafted, strict=True))
    row = {
        "family": name,
        "architecture": json.loads((target / "config.json").read_text())["architectures"][0],
        "train": trained,
        "export": exported,
        "generate": {"prompts": len(prompts), "same": same,
                     "acceptance_length": round(stats.acceptance_length, 4),
                     "accepted_per_position": [round(s, 4) for s in stats.accepted_per_position]},
    }  # fmt: skip
    if vllm:
        row["vllm"] = in_vllm(vllm, target, folder / "exported", prompts, drafted)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vllm-python", default=os.environ.get("PEAGLE_VLLM_PYTHON"))
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--output", type=Path, default=RESULTS / "families.json")
    args = parser.parse_args()
    rows = []
    for name in args.families:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(family(name, Path(folder), args.vllm_python))
        print(json.dumps(rows[-1], indent=1), flush=True)
        settings = {"steps": STEPS, "k": K, "max_tokens": TOKENS, "dtype": "float32"}
        write_json(args.output, {**environment(), "settings": settings, "rows": rows})


if __name__ == "__main__":
    main()
