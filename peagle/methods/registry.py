"""The drafting methods by name."""

from peagle.methods.base import Method
from peagle.methods.eagle3 import Eagle3
from peagle.methods.p_eagle import PEagle
from peagle.model.config import DrafterConfig

METHODS: dict[str, Method] = {PEagle.name: PEagle(), Eagle3.name: Eagle3()}
DEFAULT = PEagle.name  # of a new head


def method_of(config: DrafterConfig) -> Method:
    """The method of a head."""
    return METHODS[config.method]
