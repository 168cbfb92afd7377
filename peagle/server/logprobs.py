"""Log-probabilities as the two APIs show them."""

from typing import Any

from transformers import PreTrainedTokenizerBase

from peagle.engine.params import TokenLogprob

LEAST = -9999.0  # JSON has no infinity


def of_chat(tokenizer: PreTrainedTokenizerBase, tokens: list[TokenLogprob]) -> dict[str, Any]:
    """A list with an entry a token."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        text = tokenizer.decode([token])
        shown = list(text.encode("utf-8", errors="replace"))
        return {"token": text, "logprob": max(logprob, LEAST), "bytes": shown}

    content = [
        entry(token, logprob) | {"top_logprobs": [entry(*best) for best in top]}
        for token, logprob, top in tokens
    ]
    return {"content": content, "refusal": None}


def of_text(
    tokenizer: PreTrainedTokenizerBase, tokens: list[TokenLogprob], offset: int
) -> dict[str, Any]:
    """Lists beside each other; `offset` characters of the answer came before."""
    texts = [tokenizer.decode([token]) for token, _, _ in tokens]
    tops, offsets = [], []
    for text, (_, logprob, top) in zip(texts, tokens, strict=True):
        best = {tokenizer.decode([token]): max(value, LEAST) for token, value in top}
        tops.append(best | {text: max(logprob, LEAST)})
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": texts,
        "token_logprobs": [max(logprob, LEAST) for _, logprob, _ in tokens],
        "top_logprobs": tops,
        "text_offset": offsets,
    }
