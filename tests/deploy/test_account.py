"""SageMaker accounts: bad settings are refused, and a dry run may leave some open."""

from typing import Any

import pytest

from peagle.deploy.sagemaker import PLACEHOLDERS, Account
from peagle.errors import InputError

GIVEN: dict[str, Any] = {
    "region": "us-west-2",
    "role": "arn:aws:iam::123456789012:role/peagle",
    "instance_type": "ml.g4dn.12xlarge",
}


def test_placeholders_pass_and_what_is_like_them_does_not() -> None:
    assert Account(**PLACEHOLDERS).role == "ROLE_ARN"
    for name in ("role", "instance_type"):
        for wrong in ("", PLACEHOLDERS[name].lower()):
            with pytest.raises(InputError, match=f"{name} '{wrong}'"):
                Account(**{**PLACEHOLDERS, name: wrong})


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"role": "me"}, "role 'me': is no ARN of a role"),
        ({"instance_type": "p5"}, "instance_type 'p5': SageMaker's begin with 'ml.'"),
        ({"replicas": 0}, "replicas 0: must be at least 1"),
        (
            {"replicas": 3, "max_replicas": 2},
            r"max_replicas 2: must be at least `replicas` \(3\)",
        ),
    ],
)
def test_bad_input(other: dict[str, Any], why: str) -> None:
    with pytest.raises(InputError, match=why):
        Account(**{**GIVEN, **other})
