"""A head as vLLM reads it: found by name, compared with its target, exported where it must be."""

import hashlib
import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from peagle.catalog import find_head, known_entry, speculative_config
from peagle.errors import InputError
from peagle.files import writing
from peagle.methods.checkpoint import HeadFiles, read_config, read_json
from peagle.methods.keys import LAYER_IDS, SPECULATORS, default_k
from peagle.methods.layer_ids import nested_ids
from peagle.methods.load import head_folder, load_drafter
from peagle.methods.registry import method_of
from peagle.methods.save import save_drafter
from peagle.model.config import DrafterConfig
from peagle.model.loader import load_target, locate, reading
from peagle.model.template import use_template
from peagle.paths import cache_dir

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Head:
    """A head in a folder, and its num_speculative_tokens."""

    folder: Path
    config: DrafterConfig
    k: int

    @property
    def needs_v1(self) -> bool:
        """Whether only vLLM's V1 model runner serves it: the V2 one does not draft in parallel,
        and takes default layer ids where they are in eagle_config alone."""
        raw = read_json(self.folder)
        hidden_ids = not raw.get(LAYER_IDS) and "eagle_config" in raw
        return method_of(self.config).parallel or hidden_ids

    def speculative(self) -> dict[str, Any]:
        """Return vLLM's --speculative-config."""
        return speculative_config(method_of(self.config).parallel, str(self.folder), self.k)


def target_config(target: str) -> PretrainedConfig:
    """Return the configuration of a target's decoder, without its weights."""
    path, revision = locate(target)
    with reading(target):
        return AutoConfig.from_pretrained(path, revision=revision).get_text_config()


def choose(target: str, head: str | None, method: str | None, k: int | None) -> Head | None:
    """Find the head that is named, or the catalog's, as it is on disk; None for none.

    Raises InputError for a head of another method, or of another target as far as sizes tell.
    """
    if method == "lookup":
        why = "only the native engine has it"
        raise InputError(why, field="method", value=method, fix="choose a method of heads for vLLM")
    name = find_head(target, head, method)
    if name is None:
        return None
    folder, sizes = head_folder(name), target_config(target)
    config = read_config(folder, sizes.num_hidden_layers)
    if nested_ids(HeadFiles(read_json(folder), {})):
        how = "as what enters a layer: `peagle doctor` tries it, and says what to write"
        log.warning("head %s: vLLM reads layer ids that are in eagle_config only %s", name, how)
    if method is not None and config.method != method:
        why = f"is a {config.method} head, not {method}"
        raise InputError(why, field="head", value=Path(name))
    _check_sizes(name, config, sizes)
    entry = None if head else known_entry(target)
    known = entry.heads.get(config.method) if entry else None
    default = known.k if known else default_k(config)
    return Head(folder, config, k or default)


def _check_sizes(name: str, head: DrafterConfig, target: PretrainedConfig) -> None:
    facts = (
        ("target hidden size", head.target_hidden_size, target.hidden_size),
        ("vocabulary", head.transformer.vocab_size, target.vocab_size),
    )
    why = ""
    for what, trained, found in facts:
        if trained != found:
            why = f"trained for another target: its {what} is {trained}, that of this one {found}"
    count = target.num_hidden_layers  # as an id: the output of the last layer
    if max(head.feature_layers) > count:
        why = f"it reads layer {max(head.feature_layers)}, the target has layers 0 to {count - 1}"
    if why:
        raise InputError(why, field="head", value=Path(name))


def is_readable(folder: Path) -> bool:
    """Whether vLLM reads a head as it is. It reads both dialects, but not int8 rows, nor the single
    row that is all some native heads hold of the embedding, and it drops fc_norm of speculators'
    peagle."""
    config, raw = read_config(folder), read_json(folder)
    drops_norm = SPECULATORS in raw and config.fc_norm and method_of(config).parallel
    return config.embedding != "mask-row" and raw.get("dtype") != "int8" and not drops_norm


def as_vllm_reads_it(head: Head, target: str, template: str | None, *, force: bool) -> Head:
    """Return the head itself, or its export, which is made once and kept in the cache."""
    if is_readable(head.folder):
        return head
    states = [(file, file.stat()) for file in sorted(head.folder.iterdir())]
    files = [(file.name, state.st_size, state.st_mtime_ns) for file, state in states]
    made_of = repr((str(head.folder.resolve()), files, locate(target), template, force))
    folder = cache_dir() / "exported" / hashlib.sha256(made_of.encode()).hexdigest()[:16]
    if not folder.is_dir():
        model = load_target(target, device="cpu")  # the GPU is vLLM's
        assert model.tokenizer is not None
        use_template(model.tokenizer, template)
        drafter = load_drafter(head.folder, model, force=force)
        with writing(folder, "cache"):
            save_drafter(drafter, folder, "vllm", dtype=None)
    return replace(head, folder=folder, config=read_config(folder))
