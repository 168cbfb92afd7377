"""Conversations to answer, and the state of one while it is answered."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from peagle.data.chat import PLAIN_STYLE, Message, Style


class Conversation(NamedTuple):
    """A conversation to answer: `asks[i]` are the messages that lead to the i-th answer."""

    asks: list[list[Message]]
    style: Style = PLAIN_STYLE


@dataclass(slots=True)
class PendingRecord:
    """A conversation that is being answered, and its lines of the data file."""

    number: int  # from 0
    conversation: Conversation
    messages: list[Message] = field(default_factory=list)  # turns so far, with their answers
    lines: list[dict[str, Any]] = field(default_factory=list)
    answers: int = 0
    truncated: int = 0  # answers whose conversation lost its oldest turns to fit
    skipped: int = 0  # turns not answered: one that is too long even alone, and all after it
    tries: int = 0  # failed requests, counted by the caller

    @property
    def open(self) -> bool:
        """True while a turn is left to answer."""
        return self.answers + self.skipped < len(self.conversation.asks)

    def asked(self) -> list[Message]:
        """Return the conversation up to the next answer."""
        return [*self.messages, *self.conversation.asks[self.answers]]

    def add_answer(
        self, asked: list[Message], answer: Message, tokens: dict[str, list[int]] | None = None
    ) -> None:
        """Add the answer to `asked`, which is `self.asked()` or its newest turns.

        With the answer's tokens every answer is a line. Without, a line holds the conversation and
        teaches all its answers, so there is one, and another after every truncation.
        """
        truncated = len(asked) < len(self.asked())
        self.truncated += truncated
        self.answers += 1
        self.messages = [*asked, answer]
        known: dict[str, Any] = tokens or {"answers": 1}
        if tokens is None and self.lines and not truncated:
            known["answers"] += self.lines.pop()["answers"]
        style = self.conversation.style.in_line()
        self.lines.append({"record": self.number, "messages": self.messages, **style, **known})

    def skip(self) -> None:
        """Give up the rest: the next turn is too long even alone."""
        self.skipped = len(self.conversation.asks) - self.answers


# Called with records that are finished.
Write = Callable[[list[PendingRecord]], None]


def drop_oldest(messages: list[Message]) -> list[Message]:
    """Drop the oldest user turn and all that followed until the next; the system turn stays.
    Returns an empty list when there is only one user turn."""
    users = [index for index, message in enumerate(messages) if message["role"] == "user"]
    if len(users) == 1:
        return []
    return messages[: users[0]] + messages[users[1] :]
