"""The error and the warning that users see, and texts shortened for them."""


class InputError(ValueError):
    """Something the user gave is wrong; the message names it and says what to do (exit code 2)."""


class InputWarning(UserWarning):
    """Something the user gave works, and will not do them good; the message says why."""


def first_line(error: Exception) -> str:
    """The first line of an error's text: what a person needs of it."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def shortened(text: str, most: int = 60) -> str:
    """A text as it is shown: of a long one the beginning, `most` characters with its dots."""
    return text if len(text) <= most else text[: most - 3] + "..."
