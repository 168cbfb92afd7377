"""Tokens to text as they come."""

from transformers import PreTrainedTokenizerBase

WINDOW = 16  # maximum number of newest tokens that are decoded together, unless they are bytes
KEPT = 8  # tokens that are kept of a full window: no character has more bytes
LONE = "\N{REPLACEMENT CHARACTER}"  # the text of bytes that are no character, or not yet


class TextStream:
    """Text of one request: all in all what the tokenizer decodes from its tokens. Text that may
    still become a stop string is held back, and so are bytes that may become a character."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: tuple[str, ...]) -> None:
        self._tokenizer = tokenizer.backend_tokenizer
        self._stop = stop
        self._newest = list[int]()
        self._known = 0  # characters of their text that were taken into `_held`
        self._in_bytes = False  # the newest tokens are a run of byte tokens
        self._held = ""
        self.text = ""

    def push(self, token: int) -> tuple[str, bool]:
        """Add a token; returns the text now certain, and True if a stop string is complete."""
        self._newest.append(token)
        # A run of byte tokens is text, or not, as a whole (Llama 2, Gemma); tokens without text do
        # not end it.
        if (self._tokenizer.id_to_token(token) or "").startswith("<0x"):
            self._in_bytes = True
        elif not self._in_bytes or self._tokenizer.decode([token]):
            self._in_bytes = False
            self._take(self._decoded().removesuffix(LONE))
        if (stop := self._first_stop()) is not None:
            certain, self._held = self._held[:stop], ""
            self.text += certain
            self._newest = []
            return certain, True
        keep = max((_overlap(self._held, stop) for stop in self._stop), default=0)
        cut = len(self._held) - keep
        certain, self._held = self._held[:cut], self._held[cut:]
        self.text += certain
        return certain, False

    def finish(self) -> str:
        """The text that was held back, once no token follows; none after a stop string."""
        self._take(self._decoded())
        rest, self._held = self._held[: self._first_stop()], ""
        self.text += rest
        return rest

    def _first_stop(self) -> int | None:
        """The place in the held text where a stop string begins; None without one."""
        return min((at for stop in self._stop if (at := self._held.find(stop)) >= 0), default=None)

    def _take(self, decoded: str) -> None:
        """Hold the new text of the newest tokens, and forget the oldest tokens."""
        self._held += decoded[self._known :]
        if len(self._newest) > WINDOW:
            self._newest = self._newest[-KEPT:]
            decoded = self._decoded().removesuffix(LONE)
        self._known = len(decoded)

    def _decoded(self) -> str:
        return str(self._tokenizer.decode(self._newest))


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if stop.startswith(text[-n:])), 0)
