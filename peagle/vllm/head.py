"""A head as vLLM takes it: found by name, compared with its target, exported where it must be."""

import hashlib

from transformers import AutoConfig, PretrainedConfig

from peagle.catalog import choose_head, known_entry
from peagle.errors import InputError, first_line
from peagle.methods.checkpoint import read_config, save_drafter
from peagle.methods.load import find_head, load_drafter
from peagle.model.loader import UNREADABLE, load_target, locate
from peagle.model.template import use_template
from peagle.paths import cache_dir
from peagle.vllm.serve import Head, check_sizes, read_as_it_is

MOST = 7  # draft tokens, where nobody says how many


def target_config(target: str) -> PretrainedConfig:
    """The configuration of a target's decoder, without its weights."""
    path, revision = locate(target)
    try:
        return AutoConfig.from_pretrained(path, revision=revision).get_text_config()
    except UNREADABLE as error:
        raise InputError(f"target {target}: {first_line(error)}") from error


def choose(target: str, head: str | None, method: str | None, k: int | None) -> Head | None:
    """The head that is named, or the catalog's, as it is on disk; None for none."""
    name = choose_head(target, head, method, k)
    if name is None:
        return None
    folder, sizes = find_head(name), target_config(target)
    config = read_config(folder, sizes.num_hidden_layers)
    if method is not None and config.method != method:
        raise InputError(f"head {name} is a {config.method} head, not {method}")
    check_sizes(name, config, sizes)
    entry = None if head else known_entry(target)
    known = entry.heads.get(config.method) if entry else None
    return Head(folder, config, k or (known.k if known else config.depths or MOST))


def as_vllm_reads_it(head: Head, target: str, template: str | None, *, force: bool) -> Head:
    """The head itself, or what `peagle export --to vllm` makes of it, made once and kept."""
    if read_as_it_is(head.folder):
        return head
    files = [
        (file.name, file.stat().st_size, file.stat().st_mtime_ns)
        for file in sorted(head.folder.iterdir())
    ]
    made_of = repr((str(head.folder.resolve()), files, locate(target), template, force))
    folder = cache_dir() / "exported" / hashlib.sha256(made_of.encode()).hexdigest()[:16]
    if not folder.is_dir():
        model = load_target(target, device="cpu")  # the GPU is vLLM's
        assert model.tokenizer is not None
        use_template(model.tokenizer, template)
        save_drafter(load_drafter(head.folder, model, force=force), folder, "vllm", dtype=None)
    return Head(folder, read_config(folder), head.k)
