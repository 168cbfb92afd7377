"""A head as vLLM reads it: compared with its target, and exported where it must be."""

import hashlib
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from peagle.catalog import speculative_config
from peagle.errors import InputError, first_line
from peagle.files import writing
from peagle.heads.find import Head
from peagle.heads.format import read_config, read_keys
from peagle.heads.load import load_drafter, nested_ids
from peagle.heads.save import save_drafter
from peagle.methods.keys import LAYER_IDS
from peagle.methods.registry import METHODS
from peagle.model.loader import UNREADABLE, load_target, locate
from peagle.model.template import use_template
from peagle.paths import cache_dir

log = logging.getLogger(__name__)


def speculative(head: Head) -> dict[str, Any]:
    """vLLM's --speculative-config."""
    return speculative_config(METHODS[head.method].parallel, str(head.folder), head.k)


def needs_v1(head: Head) -> bool:
    """Whether only vLLM's V1 model runner serves the head: the V2 one does not draft in parallel,
    and takes default layer ids where they are in eagle_config alone."""
    keys = read_keys(head.folder)
    hidden_ids = not keys.raw.get(LAYER_IDS) and "eagle_config" in keys.raw
    return METHODS[head.method].parallel or hidden_ids


def target_config(target: str) -> PretrainedConfig:
    """The configuration of a target's decoder, without its weights."""
    path, revision = locate(target)
    try:
        return AutoConfig.from_pretrained(path, revision=revision).get_text_config()
    except UNREADABLE as error:
        raise InputError(first_line(error), field="target", value=target) from error


def check_sizes(head: Head, target: PretrainedConfig) -> None:
    """Raise InputError for a head of another target, by its sizes. Log how vLLM counts layer ids
    that may be counted in two ways."""
    count = target.num_hidden_layers  # as an id: the last layer's output
    config = read_config(head.folder, count)
    facts = (
        ("target hidden size", config.target_hidden_size, target.hidden_size),
        ("vocabulary", config.transformer.vocab_size, target.vocab_size),
    )
    for what, trained, found in facts:
        if trained != found:
            why = f"its {what} is {trained}, that of the target is {found}"
            raise InputError(why, field="head", value=Path(head.name))
    if max(config.feature_layers) > count:
        why = f"it reads layer {max(config.feature_layers)}, the target has 0 to {count - 1}"
        raise InputError(why, field="head", value=Path(head.name))
    if nested_ids(read_keys(head.folder)):
        how = "as the inputs of layers: `peagle doctor` tests this and prints the ids to write"
        log.warning(
            "head %s: vLLM reads layer ids that are in eagle_config only %s", head.name, how
        )


def is_readable(head: Head) -> bool:
    """Whether vLLM reads a head as it is. It reads both dialects, but not int8 rows, nor the single
    row that is all some native heads hold of the embedding, and it drops fc_norm of speculators'
    peagle."""
    keys = read_keys(head.folder)
    if keys.speculators and keys.raw.get("fc_norm") and METHODS[head.method].parallel:
        return False
    return keys.native.get("embedding") != "mask-row" and keys.raw.get("dtype") != "int8"


def as_vllm_reads_it(head: Head, target: str, template: str | None, *, force: bool) -> Head:
    """The head itself, or its export, which is made once and kept in the cache."""
    if is_readable(head):
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
    return replace(head, folder=folder)
