"""Tiny random models: a Llama target with a tokenizer and chat template, and heads for it."""

import json
from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from peagle.data.example import Example
from peagle.engine.llm import LLM
from peagle.engine.params import SamplingParams
from peagle.engine.tree import Candidate, Draft, along, grow
from peagle.methods import registry
from peagle.model.attention import CausalAttend
from peagle.model.config import DrafterConfig
from peagle.model.drafter import Drafter
from peagle.model.layer_config import LayerConfig
from peagle.model.target import Target
from peagle.train.warm_start import draft_offsets

CORPUS = "the cat sat on the mat and then the other cat ran to the hat; what a day! "
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|reserved_0|>", "<|reserved_1|>"]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
METHODS: tuple[str, ...] = ("p-eagle", "eagle3")


def make_tokenizer(template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """Byte-level BPE over ASCII letters, ids 0 to 4 special."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = [chr(i) for i in range(33, 127)] + ["Ġ", "Ċ"]
    trainer = trainers.BpeTrainer(
        vocab_size=128, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([CORPUS] * 3, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", bos_token="<|endoftext|>"
    )
    tokenizer.chat_template = template
    return tokenizer


def byte_fallback(words: list[str]) -> Tokenizer:
    """As Llama 2 and Gemma have it: words with their space, and bytes for all else."""
    backend = Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, [], byte_fallback=True))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])
    return backend


def with_call_tokens(tokenizer: PreTrainedTokenizerFast, special: bool) -> PreTrainedTokenizerFast:
    """A copy whose ids 3 and 4 are the marks of tool calls, `special` where they have no text."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    vocab = state["model"]["vocab"]
    for number, mark in enumerate(("<tool_call>", "</tool_call>"), start=3):
        vocab[mark] = vocab.pop(SPECIAL[number])
        [added] = [token for token in state["added_tokens"] if token["id"] == number]
        added |= {"content": mark, "special": special}
    made = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(state)),
        eos_token="<|im_end|>", bos_token="<|endoftext|>",
    )  # fmt: skip
    made.chat_template = CHATML + "{# <tool_call> #}"
    return made


def make_target(
    vocab: int = 128, *, seed: int = 0, layers: int = 4, context: int = 256, spread: float = 0.12
) -> Target:
    """A random float32 Llama; `spread` is the deviation of its weights."""
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=32, intermediate_size=64, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=context,
        initializer_range=spread, eos_token_id=None, bos_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(seed)
    return Target(LlamaForCausalLM(config).eval(), make_tokenizer(), f"tiny-{seed}")


def save_target(target: Target, folder: Path) -> Path:
    """A folder as users have models: config, weights, tokenizer with a chat template."""
    assert target.tokenizer is not None
    target.model.save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    return folder


def make_drafter(
    target: Target,
    method: str,
    *,
    seed: int = 1,
    layers: int = 2,
    draft_vocab: int | None = None,
    **flags: bool,
) -> Drafter:
    """A head with random weights, its draft vocabulary the upper ids of the target's."""
    vocab, width = target.embedding.shape
    size = draft_vocab or vocab * 3 // 4
    config = DrafterConfig(
        method=method,
        transformer=LayerConfig(
            vocab_size=vocab, hidden_size=width, intermediate_size=48, num_hidden_layers=layers,
            num_attention_heads=4, num_key_value_heads=2, rms_norm_eps=1e-5,
        ),
        feature_layers=tuple(sorted({0, len(target.layers) // 3, len(target.layers) - 1})),
        draft_vocab_size=size,
        target_hidden_size=width,
        mask_token_id=3 if registry.METHODS[method].parallel else None,
        embedding="mask-row" if registry.METHODS[method].parallel else "shared",
        **flags,
    )  # fmt: skip
    torch.manual_seed(seed)
    drafter = registry.method_of(config).build(config)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2 + (parameter.ndim == 1))
    drafter.d2t.copy_(draft_offsets(torch.arange(vocab - size, vocab)))
    drafter.share_embedding(target.embedding)
    return drafter.eval()


def random_prompts(
    count: int, longest: int = 12, *, vocab: int = 128, seed: int = 0
) -> list[list[int]]:
    """Prompts of different lengths over ordinary tokens."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(5, vocab, (n,), generator=generator).tolist() for n in lengths]


def chain(tokens: Iterable[int]) -> Draft:
    """A draft of one token after another, sure of all."""
    nodes = list(map(Candidate, tokens))
    return grow(along(nodes), len(nodes))


def own_answers(target: Target, count: int, length: int = 24) -> list[Example]:
    """Documents whose answers are the target's own greedy continuations."""
    prompts = random_prompts(count, 4, vocab=target.embedding.shape[0], seed=9)
    params = SamplingParams(max_tokens=length, ignore_eos=True)
    done = LLM(target, max_batch=count, lookup=False).generate(prompts, params)
    return [
        Example([*p, *c.token_ids], [False] * len(p) + [True] * length)
        for p, c in zip(prompts, done, strict=True)
    ]


def features_of(target: Target, drafter: Drafter, ids: list[int]) -> Tensor:
    """Features (N, F·E) of a sequence, from one forward without a cache."""
    layers = drafter.config.feature_layers
    return target.forward(
        torch.tensor(ids), torch.arange(len(ids)), CausalAttend(), layers
    ).features
