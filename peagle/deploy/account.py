"""Where SageMaker deploys: as whom, and on how many instances."""

import re
from dataclasses import dataclass

from peagle.errors import InputError

# What a dry run prints for what it was not told, by the names of Account's fields.
PLACEHOLDERS = {"region": "REGION", "role": "ROLE_ARN", "instance_type": "INSTANCE_TYPE"}


@dataclass(frozen=True, slots=True)
class Account:
    """Where, as whom, and on how many instances; checked, but for placeholders."""

    region: str
    role: str  # the execution role's ARN
    instance_type: str
    image: str | None = None  # None: AWS's own
    replicas: int = 1
    max_replicas: int | None = None  # None: always `replicas`

    def __post_init__(self) -> None:
        is_arn = re.fullmatch(r"arn:aws[a-z-]*:iam::\d{12}:role/\S+", self.role)
        if not is_arn and self.role != PLACEHOLDERS["role"]:
            why = "is no ARN of a role (arn:aws:iam::ACCOUNT:role/NAME)"
            raise InputError(f"role {self.role!r}: {why}")
        is_type = self.instance_type.startswith("ml.")
        if not is_type and self.instance_type != PLACEHOLDERS["instance_type"]:
            raise InputError(f"instance_type {self.instance_type!r}: SageMaker's begin with 'ml.'")
        if self.replicas < 1:
            raise InputError(f"replicas {self.replicas}: must be at least 1")
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            why = f"must be at least `replicas` ({self.replicas})"
            raise InputError(f"max_replicas {self.max_replicas}: {why}")
