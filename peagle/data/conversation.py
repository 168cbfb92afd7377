"""One conversation while it is answered: what is asked next, what was said, what did not fit."""

from dataclasses import dataclass, field
from typing import Any

from peagle.data.chat import Message
from peagle.data.dataset import Conversation


@dataclass(slots=True)
class Talk:
    """A record being answered, and its lines of the data file."""

    record: int
    conversation: Conversation
    messages: list[Message] = field(default_factory=list)  # asked and said so far
    lines: list[dict[str, Any]] = field(default_factory=list)
    answers: int = 0
    truncated: int = 0  # of them, those whose conversation lost its oldest turns to fit
    skipped: int = 0  # turns not answered: the first of them is too long even alone
    tries: int = 0  # failed attempts, counted by whoever makes them

    @property
    def open(self) -> bool:
        """Whether there is a turn left to answer."""
        return self.answers + self.skipped < len(self.conversation.asks)

    def asked(self) -> list[Message]:
        """The conversation up to the next answer."""
        return [*self.messages, *self.conversation.asks[self.answers]]

    def say(self, asked: list[Message], answer: Message, tokens: dict[str, list[int]]) -> None:
        """Note the answer to `asked`, which is `self.asked()` or what was left of it.

        With the answer's tokens every answer is a line. Without, a line holds the conversation and
        teaches all its answers, so there is one, and another after every truncation.
        """
        truncated = len(asked) < len(self.asked())
        self.truncated += truncated
        self.answers += 1
        self.messages = [*asked, answer]
        if not tokens:
            goes_on = bool(self.lines) and not truncated
            known: dict[str, Any] = {"answers": 1 + (self.lines.pop()["answers"] if goes_on else 0)}
        else:
            known = {**tokens}
        style = self.conversation.style.in_line()
        self.lines.append({"record": self.record, "messages": self.messages, **style, **known})

    def skip(self) -> None:
        """Give up the rest: the next turn is too long even alone."""
        self.skipped = len(self.conversation.asks) - self.answers


def drop_oldest(messages: list[Message]) -> list[Message] | None:
    """Without the oldest user turn and all that followed until the next; the system turn stays.
    None when there is only one user turn."""
    users = [index for index, message in enumerate(messages) if message["role"] == "user"]
    return messages[: users[0]] + messages[users[1] :] if len(users) > 1 else None
