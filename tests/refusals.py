"""Bad input is refused: the error is an InputError in one line, of the field that is wrong."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from peagle.errors import InputError


@contextmanager
def refused(field: str | None = None) -> Iterator[pytest.ExceptionInfo[InputError]]:
    """Expect an InputError of `field`; None: of no single one."""
    with pytest.raises(InputError) as found:
        yield found
    assert found.value.field == field
    assert len(str(found.value).splitlines()) == 1
