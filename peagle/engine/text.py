"""Tokens to text as they come, and where a request ends."""

from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerBase

from peagle.model.target import Target


class TextStream:
    """Text of one request. Text that may still become a stop string is held back."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: tuple[str, ...]) -> None:
        self._tokenizer, self._stop = tokenizer.backend_tokenizer, stop
        self._decoder = DecodeStream(skip_special_tokens=True)
        self._held = ""
        self.text = ""

    def push(self, token: int) -> tuple[str, bool]:
        """(text that is now certain, whether a stop string was completed)."""
        self._held += self._decoder.step(self._tokenizer, token) or ""
        found = [at for stop in self._stop if (at := self._held.find(stop)) >= 0]
        if found:
            certain, self._held = self._held[: min(found)], ""
            self.text += certain
            return certain, True
        keep = max((_overlap(self._held, stop) for stop in self._stop), default=0)
        cut = len(self._held) - keep
        certain, self._held = self._held[:cut], self._held[cut:]
        self.text += certain
        return certain, False

    def finish(self) -> str:
        """What was held back, once no token follows."""
        rest, self._held = self._held, ""
        self.text += rest
        return rest


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if stop.startswith(text[-n:])), 0)


def end_tokens(target: Target) -> set[int]:
    """Ids that end an answer: the generation config's, and the tokenizer's eos."""
    ends = getattr(target.model.generation_config, "eos_token_id", None)
    ids = set(ends if isinstance(ends, list) else [ends])
    ids.add(getattr(target.tokenizer, "eos_token_id", None))
    return {i for i in ids if i is not None}
