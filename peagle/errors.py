"""The error and the warning that users see, and texts shortened for them."""

from numbers import Integral
from pathlib import Path


class InputError(ValueError):
    """Bad input of the user: one line that names the field, the value and the fix (exit code 2).

    `field`: the option as Python spells it (max_tokens), or a part of it (messages[1]).
    Names of further fields stand in backticks in `why` and `fix`; the CLI makes flags of them.
    """

    def __init__(
        self, why: str, *, field: str | None = None, value: object = None, fix: str | None = None
    ) -> None:
        self.why = why
        self.field = field
        self.value = value
        self.fix = fix
        super().__init__(self.named(field))

    def named(self, field: str | None) -> str:
        """The line, with the field under another name."""
        value = None if self.value is None else _shown(self.value)
        subject = " ".join(part for part in (field, value) if part is not None)
        line = f"{subject}: {self.why}" if subject else self.why
        return f"{line}; {self.fix}" if self.fix else line


def check_at_least(least: int, **values: float | None) -> None:
    """Raises InputError for a setting that is no whole number of at least `least`; None is one that
    is not given."""
    for name, value in values.items():
        if value is not None and not (isinstance(value, Integral) and value >= least):
            raise InputError(f"must be a whole number of at least {least}", field=name, value=value)


class InputWarning(UserWarning):
    """A valid setting that is probably a mistake; the message gives the reason."""


def first_line(error: Exception) -> str:
    """The first line of an error's text: what a person needs of it."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def shortened(text: str, max_length: int = 60) -> str:
    """The text, or its beginning and dots: at most `max_length` characters."""
    return text if len(text) <= max_length else text[: max_length - 3] + "..."


def _shown(value: object) -> str:
    """A value for a message; a path whole, because its end matters more than its beginning."""
    text = repr(value) if isinstance(value, str) else str(value)
    return text if isinstance(value, Path) else shortened(text)
