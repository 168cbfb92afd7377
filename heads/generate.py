"""Answer many prompts at once on a GPU.

    python heads/generate.py smollm2-135m prompts.jsonl answers.jsonl --temperature 0.8

Reads lines with `prompt_ids`, and writes them with `answer_ids`, in an order of its own, until all
are answered or `--seconds` have passed. Prompts of like lengths are answered together: one call for
each matrix product of all rows, keys in one table, rows that have ended left out every few steps.
For Llama's layers only, in bf16: near a tie another token may win than in the engine.

Shapes: B rows, P prompt tokens, T keys, E hidden, N query heads, M key/value heads, G = N / M, H
head size, V vocabulary.
"""

import argparse
import json
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from peagle.data.records import read_records
from peagle.model.layers import Rotation
from peagle.model.loader import load_target
from peagle.model.target import Target

ROWS = 2048  # answered together, at most
KEYS = 600_000  # of all rows together, at most
PREFILL = 1 << 16  # prompt tokens that run at once
LEAVE_OUT = 16  # steps between two times that ended rows are left out
MIN_P = 0.05  # sampled tokens have at least this share of the likeliest one's probability
PERIOD = 64  # tokens of what repeats in a loop, at most
LOOP, KEPT = 96, 48  # tokens of a loop that is cut, at least, and that stay of it


class Weights(NamedTuple):
    """The weights of a layer; products that read the same are one."""

    norm: Tensor
    qkv: Tensor
    out: Tensor
    post_norm: Tensor
    gate_up: Tensor
    down: Tensor


class Generator:
    """A target whose layers are Llama's."""

    def __init__(self, target: Target) -> None:
        model: Any = target.model
        config = model.config
        assert config.model_type == "llama", "for Llama's layers only"
        self.ends = torch.tensor(sorted(target.end_tokens), device=target.device)
        self.embedding, self.head = target.embedding, model.lm_head.weight
        self.final, self.eps = model.model.norm.weight, config.rms_norm_eps
        self.kv_heads, self.size = target.kv_shapes[0].heads, target.kv_shapes[0].key_size
        self.groups = config.num_attention_heads // self.kv_heads
        positions = torch.arange(target.max_context, device=target.device)[None]
        self.rotation = Rotation.of(*model.model.rotary_emb(target.embedding, positions))
        self.layers = [
            Weights(
                layer.input_layernorm.weight,
                torch.cat([getattr(layer.self_attn, f"{x}_proj").weight for x in "qkv"]),
                layer.self_attn.o_proj.weight,
                layer.post_attention_layernorm.weight,
                torch.cat([layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight]),
                layer.mlp.down_proj.weight,
            )
            for layer in model.model.layers
        ]

    @torch.inference_mode()
    def answer(
        self, prompts: Sequence[list[int]], most: int, temperature: float
    ) -> list[list[int]]:
        """At most `most` tokens each, the end token among them."""
        device = self.embedding.device
        longest = max(map(len, prompts))
        ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        ids = ids.to(device)
        empty = longest - torch.tensor([len(prompt) for prompt in prompts], device=device)
        shape = len(prompts), self.kv_heads, longest + most, self.size
        self.cache = [
            [self.embedding.new_empty(shape) for _ in ("keys", "values")] for _ in self.layers
        ]
        hidden = self._prefill(ids, empty)
        rows = torch.arange(len(prompts), device=device)
        answers = torch.full((len(prompts), most), -1, dtype=torch.int64, device=device)
        ended = torch.zeros_like(rows, dtype=torch.bool)
        for step in range(most):
            tokens = self._choose(hidden, temperature)
            answers[rows, step] = torch.where(ended, -1, tokens)
            ended |= torch.isin(tokens, self.ends)
            if step % LEAVE_OUT == LEAVE_OUT - 1:
                left = (~ended).nonzero()[:, 0]
                if len(left) < 0.9 * len(rows):
                    if not len(left):
                        break
                    for layer in self.cache:  # one by one: both copies of all would be too much
                        layer[:] = [x[left] for x in layer]
                    rows, empty, tokens, ended = (x[left] for x in (rows, empty, tokens, ended))
            hidden = self._run(tokens[:, None], empty, slice(None), longest + step)[:, 0]
        self.cache = []
        return [[token for token in row if token >= 0] for row in answers.tolist()]

    def _prefill(self, ids: Tensor, empty: Tensor) -> Tensor:
        at_once = max(1, PREFILL // ids.shape[1])
        parts = [slice(at, at + at_once) for at in range(0, len(ids), at_once)]
        return torch.cat([self._run(ids[part], empty[part], part, 0)[:, -1] for part in parts])

    def _run(self, ids: Tensor, empty: Tensor, rows: slice, start: int) -> Tensor:
        """Normed hidden states (B, P, E) of tokens (B, P) at columns `start` on; `empty` (B,)
        columns before each prompt are no tokens."""
        count = ids.shape[1]
        columns = torch.arange(start + count, device=ids.device)
        positions = (columns[start:] - empty[:, None]).clamp(min=0)
        rotate = Rotation(*(table[positions].transpose(1, 2) for table in self.rotation))
        seen = columns >= empty[:, None]
        mask = seen[:, None, None, :]
        if count > 1:
            mask = mask & (columns[start:, None] >= columns)
            mask = mask | (columns[start:, None] == columns)  # an empty column sees itself
        x = F.embedding(ids, self.embedding)
        for layer, (keys, values) in zip(self.layers, self.cache, strict=True):
            x = x + self._attend(layer, x, keys[rows], values[rows], rotate, mask, start)
            normed = F.rms_norm(x, x.shape[-1:], layer.post_norm, self.eps)
            gate, up = F.linear(normed, layer.gate_up).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, layer.down)
        return F.rms_norm(x, x.shape[-1:], self.final, self.eps)

    def _attend(  # noqa: PLR0913, PLR0917 (the operands)
        self,
        layer: Weights,
        x: Tensor,
        keys: Tensor,
        values: Tensor,
        rotate: Rotation,
        mask: Tensor,
        start: int,
    ) -> Tensor:
        normed = F.rms_norm(x, x.shape[-1:], layer.norm, self.eps)
        heads = F.linear(normed, layer.qkv).unflatten(-1, (-1, self.size)).transpose(1, 2)
        q, k, v = heads.split([self.kv_heads * self.groups, self.kv_heads, self.kv_heads], 1)
        q, k = rotate(q), rotate(k)
        stop = start + x.shape[1]
        keys[:, :, start:stop], values[:, :, start:stop] = k, v
        if x.shape[1] > 1:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        else:  # the queries of a key head are rows of one product
            q = q.unflatten(1, (self.kv_heads, self.groups))[:, :, :, 0]
            scores = (q @ keys[:, :, :stop].mT).float() * self.size**-0.5
            weights = scores.masked_fill_(~mask, float("-inf")).softmax(-1)
            out = (weights.to(v.dtype) @ values[:, :, :stop]).flatten(1, 2)[:, :, None]
        return F.linear(out.transpose(1, 2).flatten(2), layer.out)

    def _choose(self, hidden: Tensor, temperature: float) -> Tensor:
        """Tokens (B,) after hidden states (B, E)."""
        logits = F.linear(hidden, self.head)
        if temperature == 0:
            return logits.max(-1).indices
        likely = (logits.float() / temperature).softmax(-1)
        likely.masked_fill_(likely < MIN_P * likely.amax(-1, keepdim=True), 0)
        # The largest of p / Exp(1) is p's sample.
        return (likely / torch.empty_like(likely).exponential_()).max(-1).indices


def without_loop(ids: list[int]) -> list[int]:
    """An answer that ends in a loop, up to KEPT tokens of what repeats."""
    for period in range(1, PERIOD + 1):
        pairs = zip(reversed(ids), reversed(ids[:-period]), strict=False)
        repeated = 0
        for one, other in pairs:
            if one != other:
                break
            repeated += 1
        if repeated >= LOOP:
            return ids[: len(ids) - repeated + KEPT]
    return ids


def groups(prompts: Sequence[list[int]], most: int) -> Iterator[list[int]]:
    """Numbers of prompts that are answered together, of like lengths."""
    ordered = sorted(range(len(prompts)), key=lambda number: len(prompts[number]))
    while ordered:
        longest = len(prompts[ordered[-1]]) + most
        taken = max(1, min(ROWS, KEYS // longest))
        yield ordered[-taken:]
        del ordered[-taken:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target")
    parser.add_argument("prompts", type=Path)
    parser.add_argument("answers", type=Path)
    parser.add_argument("--max-tokens", type=int, default=384)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    generator = Generator(load_target(args.target))
    torch.manual_seed(args.seed)
    records = list(read_records(args.prompts))
    prompts = [record["prompt_ids"] for record in records]
    started, tokens = time.perf_counter(), 0
    with args.answers.open("w") as file:
        every = list(groups(prompts, args.max_tokens))
        for numbers in random.Random(args.seed).sample(every, len(every)):
            asked = [prompts[number] for number in numbers]
            for number, ids in zip(
                numbers, generator.answer(asked, args.max_tokens, args.temperature), strict=True
            ):
                tokens += len(ids)
                file.write(json.dumps(records[number] | {"answer_ids": without_loop(ids)}) + "\n")
            file.flush()
            passed = time.perf_counter() - started
            print(f"{tokens} tokens, {tokens / passed:.0f} a second", flush=True)
            if passed > args.seconds:
                break


if __name__ == "__main__":
    main()
