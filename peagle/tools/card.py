"""The model card of a head: its README.md, made of what its config.json records."""

from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from peagle.catalog import source_of
from peagle.catalog_fields import is_hub_id
from peagle.files import replace_file
from peagle.heads.format import read_config
from peagle.methods.keys import default_k
from peagle.methods.registry import method_of
from peagle.model.config import DrafterConfig
from peagle.vllm.flags import speculative_config

TEMPLATE = Path(__file__).with_name("model_card.md.j2")
MARK = "<!-- Written again with the head: delete this line to keep what you change. -->"
HERE = "OWNER/NAME"  # where the head is published, which is not known when it is saved


def write_card(folder: Path) -> None:
    """Write the model card of the head in `folder`. A README.md without MARK stays."""
    file = folder / "README.md"
    if file.is_file() and MARK not in file.read_text():
        return
    replace_file(file, str(model_card(read_config(folder))))


def model_card(config: DrafterConfig) -> ModelCard:
    """Describe a head by what its config records. It names no licence, since none is recorded."""
    method = method_of(config)
    trained = config.provenance.target
    base = _hub_id(trained)
    speculative = speculative_config(method.parallel, HERE, default_k(config))
    tags = ["speculative-decoding", *{speculative["method"], config.method}]
    data = ModelCardData(
        base_model=base, library_name="peagle", pipeline_tag="text-generation", tags=sorted(tags)
    )
    return ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        mark=MARK,
        here=HERE,
        config=config,
        method=method,
        target=base or Path(trained).name,  # without a local path
        served=base or "TARGET",
        local=trained if source_of(trained) != trained else base or "TARGET",
        speculative=speculative,
        measured={name: _by_k(found) for name, found in config.provenance.acceptance.items()},
    )


def _hub_id(target: str) -> str | None:
    """The hub repository of a target's name; None for folders, files and packages."""
    source = source_of(target)
    if not isinstance(source, str) or not is_hub_id(source) or Path(source).exists():
        return None
    return source.partition("@")[0]


def _by_k(found: dict[str, Any]) -> dict[str, float]:
    """Acceptance lengths by K: so it is recorded, or as one measurement with its K."""
    return {found["k"]: found["acceptance_length"]} if "k" in found else found
