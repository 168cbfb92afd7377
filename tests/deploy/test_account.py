"""SageMaker accounts: bad settings are refused, and a dry run may leave some open."""

from typing import Any

import pytest
from refusals import refused

from peagle.deploy.sagemaker import PLACEHOLDERS, Account

GIVEN: dict[str, Any] = {
    "region": "us-west-2",
    "role": "arn:aws:iam::123456789012:role/peagle",
    "instance_type": "ml.g4dn.12xlarge",
}


def test_placeholders_pass_and_what_is_like_them_does_not() -> None:
    assert Account(**PLACEHOLDERS).role == "ROLE_ARN"
    for name in ("role", "instance_type"):
        for wrong in ("", PLACEHOLDERS[name].lower()):
            with refused(name):
                Account(**{**PLACEHOLDERS, name: wrong})


@pytest.mark.parametrize(
    ("field", "other"),
    [
        ("role", {"role": "me"}),
        ("instance_type", {"instance_type": "p5"}),
        ("replicas", {"replicas": 0}),
        ("max_replicas", {"replicas": 3, "max_replicas": 2}),
    ],
)
def test_bad_input(field: str, other: dict[str, Any]) -> None:
    with refused(field):
        Account(**{**GIVEN, **other})
