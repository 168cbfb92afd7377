"""Tiny GGUF files of a Llama with a byte-level tokenizer."""

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from refusals import refused

from peagle.model.loader import load_target

HIDDEN, FEED, VOCAB = 32, 64, 40
TOKENS = ["<|endoftext|>", *(chr(i) for i in range(97, 97 + VOCAB - 2)), "ab"]
SHAPES = {
    "token_embd": (VOCAB, HIDDEN),
    "output_norm": (HIDDEN,),
    "blk.0.attn_norm": (HIDDEN,),
    "blk.0.ffn_norm": (HIDDEN,),
    "blk.0.attn_q": (HIDDEN, HIDDEN),
    "blk.0.attn_k": (HIDDEN, HIDDEN),
    "blk.0.attn_v": (HIDDEN, HIDDEN),
    "blk.0.attn_output": (HIDDEN, HIDDEN),
    "blk.0.ffn_gate": (FEED, HIDDEN),
    "blk.0.ffn_up": (FEED, HIDDEN),
    "blk.0.ffn_down": (HIDDEN, FEED),
}


def weights() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {name: random.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def write_gguf(  # noqa: PLR0913 (parts of a file)
    path: Path,
    *,
    architecture: str = "llama",
    without: str = "",
    quantized: bool = False,
    fields: Mapping[str, str | float] = {},
    tensors: Mapping[str, np.ndarray] = {},
    tokens: Mapping[int, str] = {},
) -> Path:
    """`without` names a tensor to leave out; `quantized` stores one as nobody reads it. `fields` of
    the architecture or the tokenizer, and `tensors`, are added; `tokens` take others' places."""
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FEED)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([tokens.get(token, text) for token, text in enumerate(TOKENS)])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    for name, tensor in weights().items():
        if name == "blk.0.ffn_up" and quantized:
            blocks = np.zeros((FEED, 40), dtype=np.uint8)  # 32 weights in 40 bytes
            writer.add_tensor(f"{name}.weight", blocks, raw_dtype=GGMLQuantizationType.Q8_1)
        elif name != without:
            writer.add_tensor(f"{name}.weight", tensor)
    adds = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}
    for name, value in fields.items():
        key = name if name.startswith("tokenizer.") else f"{architecture}.{name}"
        adds[type(value)](key, value)
    for name, tensor in tensors.items():
        writer.add_tensor(name if name.endswith(".bias") else f"{name}.weight", tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def not_loaded(name: str | Path, why: str) -> None:
    """The target is refused, for a reason that has this text."""
    with refused("target") as error:
        load_target(str(name))
    assert re.search(why, str(error.value))
