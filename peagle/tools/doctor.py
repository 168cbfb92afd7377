"""Check that a head fits its target and is served as it was trained; name each difference.

Shapes: N prompt tokens, F feature layers, E target hidden, K depths, V draft vocabulary.
"""

from collections.abc import Callable
from contextlib import closing
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from peagle.backends.batch import Batch, Span, blocks_of
from peagle.backends.choose import choose_backend
from peagle.backends.kv_cache import KVCache
from peagle.bench.native import measure_acceptance
from peagle.data.chat import prompt_ids
from peagle.engine.llm import LLM
from peagle.engine.params import RequestFailure, SamplingParams
from peagle.engine.tree import Draft
from peagle.errors import InputError
from peagle.heads.checks import CHECKS, FORGIVABLE, Skipped, require, run_check
from peagle.heads.format import FETCH_AGAIN, HeadFiles, head_folder, read_head
from peagle.heads.load import Trial, load_drafter, nested_ids, try_both
from peagle.methods.base import Elements
from peagle.methods.keys import LAYER_IDS, default_k
from peagle.methods.registry import method_of
from peagle.model.drafter import Drafter
from peagle.model.target import Target
from peagle.model.template import PLAIN, use_template
from peagle.tools.head_faults import FURTHER
from peagle.train.batches import PackedDocuments
from peagle.train.passes import run_document, run_drafter

PROMPTS = (  # features and logits are compared on the first one
    "Write a Python function that reverses a list.",
    "Explain in a few sentences why the sky is blue.",
    "A train travels 120 km in 2 hours. What is its average speed?",
    "Write a short letter that thanks a friend for a gift.",
)
MAX_TOKENS = 32  # tokens of an answer whose drafts are counted
ROOM = 256  # KV cache for an answer, its drafts and a longer question
MIN_ROUNDS = 16  # fewer rounds are not significant
NEAR_ZERO = 0.1  # accepted draft tokens per round that are almost none
CAUSES = (
    "layers, chat template or target are not those it was trained with, or it was hardly trained"
)
# The largest relative difference that rounding explains.
ROUNDING = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.05}
RUNNING = ("features", "logits", "acceptance")
State = Literal["ok", "wrong", "warning", "forced", "skipped"]


class Check(NamedTuple):
    """One check; a `wrong` one makes the head unfit."""

    name: str
    state: State
    found: str
    fix: str = ""  # of a warning: its likely causes


def examine(head: str | Path, target: Target, *, force: bool = False) -> list[Check]:
    """Run all checks of a head with its target, in order; a damaged head is examined, not refused.

    `force` accepts a head trained for other weights, or with another chat template.
    Raises InputError when there is no such head.
    """
    folder = head_folder(head)
    ids = prompt_ids(_tokenizer(target), [{"role": "user", "content": PROMPTS[0]}])
    try:
        files = read_head(folder)
    except InputError as error:
        others = _skipped("the files cannot be read", *CHECKS, "loading", *RUNNING)
        return [_refused("files", error), *others]
    checks = [Check("files", "ok", f"config.json and {len(files.tensors)} tensors")]
    for name in CHECKS:
        wrong: State = "forced" if force and name in FORGIVABLE else "wrong"
        checks.append(_judge(name, partial(_check_files, name, files, target), wrong))
    try:
        drafter = load_drafter(folder, target, force=True)
    except InputError as error:
        return [*checks, _refused("loading", error), *_skipped("it cannot be loaded", *RUNNING)]
    if ids_tried := nested_ids(files):
        trial = try_both(drafter, target, ids_tried)
        checks = [_tried(check, ids_tried, trial) for check in checks]
    checks.append(_judge("loading", partial(_finite, drafter)))
    if any(check.state == "wrong" and check.name not in FORGIVABLE for check in checks):
        return checks + _skipped("mend the files first", *RUNNING)
    checks.append(_judge("features", partial(_features, drafter, target, ids)))
    checks.append(_judge("logits", partial(_logits, drafter, target, ids)))
    checks.append(_judge("acceptance", partial(_acceptance, drafter, target, len(ids)), "warning"))
    return checks


def _check_files(name: str, files: HeadFiles, target: Target) -> str:
    """The finding of a check, and of the one that continues it."""
    found = run_check(CHECKS[name], files, target)
    return run_check(FURTHER[name], files, target) if name in FURTHER else found


def verdict(checks: list[Check]) -> str:
    """One sentence: the first thing that differs and its fix, or that nothing does, with what looks
    wrong nevertheless."""
    wrong = next((check for check in checks if check.state == "wrong"), None)
    if wrong is not None:
        return f"{wrong.name}: {wrong.found}. Fix: {wrong.fix}"
    passed = sum(check.state == "ok" for check in checks)
    others = [check.name for check in checks if check.state in ("skipped", "forced")]
    left = f" (left out: {', '.join(others)})" if others else ""
    warned = [check for check in checks if check.state == "warning"]
    told = [f"; warning: {each.name}: {each.found}. Likely causes: {each.fix}" for each in warned]
    return f"nothing differs in {passed} checks{left}" + "".join(told)


def _judge(name: str, check: Callable[[], str], wrong: State = "wrong") -> Check:
    """Run a check; `wrong` is its state where it finds a fault."""
    try:
        return Check(name, "ok", check())
    except Skipped as reason:
        return Check(name, "skipped", str(reason))
    except InputError as error:
        return _refused(name, error, wrong)
    except RequestFailure as failure:
        return Check(name, wrong, str(failure), "choose another `dtype` or target")


def _refused(name: str, error: InputError, state: State = "wrong") -> Check:
    found = InputError(error.why, field=error.field, value=error.value)
    return Check(name, state, str(found), error.fix or FETCH_AGAIN)


def _tried(check: Check, ids: list[int], trial: Trial) -> Check:
    """The check; the one of ambiguous layer ids with the result of the trial."""
    layers = list(trial.layers)
    if check.name != "feature layers":
        return check
    if check.state == "ok" and layers == ids:
        return check._replace(found=trial.found)
    fix = f"write {layers} as {LAYER_IDS} in config.json, at the top and in eagle_config"
    return Check(check.name, "wrong", trial.found, fix)


def _skipped(why: str, *names: str) -> list[Check]:
    return [Check(name, "skipped", why) for name in names]


def _plain(target: Target) -> Target:
    """A copy for an engine, with a chat template."""
    return Target(target.copy().model, _tokenizer(target), target.name)


def _tokenizer(target: Target) -> PreTrainedTokenizerBase:
    """The target's tokenizer; one without a chat template writes plain text."""
    assert target.tokenizer is not None
    if target.tokenizer.chat_template is not None:
        return target.tokenizer
    tokenizer = deepcopy(target.tokenizer)
    use_template(tokenizer, PLAIN)
    return tokenizer


def _finite(drafter: Drafter) -> str:
    for name, tensor in drafter.state_dict().items():
        require(bool(tensor.isfinite().all()), f"tensor {name!r} holds NaN or infinity")
    count = sum(parameter.numel() for parameter in drafter.parameters())
    return f"{drafter.config.method}, layers: {len(drafter.layers)}, parameters: {count:,}"


@torch.no_grad()
def _features(drafter: Drafter, target: Target, ids: list[int]) -> str:
    """The engine's features are the hidden states that transformers itself reports."""
    layers = drafter.config.feature_layers
    expected = _hidden_states(target, torch.tensor(ids, device=target.device), layers)
    model = choose_backend(target.device, target.dtype).target(target)
    blocks = range(blocks_of(len(ids)))
    cache = KVCache(len(blocks), target.kv_shapes, target.dtype, target.device)
    features = model.forward(Batch.of([Span(blocks, 0, ids)]), cache, layers).features
    gap = features.view(len(ids), len(layers), -1) - expected
    away = (gap.norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-6)).amax(0)  # (F,)
    dtype = str(target.dtype).removeprefix("torch.")
    largest = f"{dtype}: max difference {gap.abs().max():.1e}, {away.max():.0e} of a row"
    layer = layers[int(away.argmax())]
    wrong = f"features of layer {layer} are not hidden_states[{layer}] of transformers: {largest}"
    fix = "no head can be trained for or served with this target as it is: report the model"
    require(float(away.max()) <= ROUNDING[target.dtype], wrong, fix)
    return largest


def _hidden_states(target: Target, tokens: Tensor, layers: tuple[int, ...]) -> Tensor:
    """(N, F, E) from an unchanged forward of the model, with eager attention. The last
    layer's output is taken by a hook: transformers reports it after the final norm."""
    plain = target.copy()
    plain.model.set_attn_implementation("eager")
    last = list[Tensor]()
    plain.layers[-1].register_forward_hook(lambda _, __, out: last.append(out))
    out = plain.decoder(tokens[None], output_hidden_states=True, use_cache=False)
    states = [*out.hidden_states[:-1], last[0]]
    return torch.stack([states[layer][0].flatten(0, -2) for layer in layers], dim=1)


@torch.no_grad()
def _logits(drafter: Drafter, target: Target, ids: list[int]) -> str:
    """The trainer's forward gives the engine's draft tokens their probabilities in the engine."""
    depths = default_k(drafter.config)
    tokens, draft = _drafted(drafter, target, ids, depths)
    trained = _trained(drafter, target, tokens, draft.tokens)
    at = torch.searchsorted(drafter.target_ids, torch.tensor(draft.tokens, device=trained.device))
    expected = trained.log_softmax(-1).gather(1, at[:, None])[:, 0]
    away = (torch.tensor(draft.probs, device=trained.device).log() - expected).abs()  # (K,)
    limit = ROUNDING[target.dtype] * max(1.0, float(trained.abs().max()))
    best = drafter.target_ids[trained.argmax(-1)].tolist()
    same = sum(a == b for a, b in zip(best, draft.tokens, strict=True))
    found = f"max difference {away.max():.1e}, {same} of {depths} argmaxes agree"
    if apart := (~(away <= limit)).nonzero()[:, 0].tolist():  # NaN, too
        why = f"training and drafting part at depth {apart[0]}: {found}"
        fix = "training and engine compute different things: report the head's config.json"
        raise InputError(why, fix=fix)
    return found


def _drafted(
    drafter: Drafter, target: Target, ids: list[int], depths: int
) -> tuple[list[int], Draft]:
    """The engine's second draft after a prompt, and all tokens before it."""
    llm = LLM(_plain(target), drafter, k=depths, max_batch=1, kv_tokens=len(ids) + ROOM)
    params = SamplingParams(max_tokens=3 * depths + 8, ignore_eos=True)
    with closing(llm.stream([ids], params)) as run:
        [request] = run.requests
        while len(request.tokens) < len(ids) + 2:
            run.step()
            if request.failure:
                raise RequestFailure(request.failure)
        return list(request.tokens), request.draft


def _trained(drafter: Drafter, target: Target, ids: list[int], draft: list[int]) -> Tensor:
    """Logits (K, V) of the chain after `ids` in the trainer's forward over all elements."""
    tokens = torch.tensor(ids + draft, device=target.device)
    features = run_document(target, ids + draft, drafter.config.feature_layers).features
    zeros = torch.zeros_like(tokens)
    sequence = PackedDocuments(tokens, zeros.bool(), zeros)
    last = len(ids) - 2  # the slot that predicts the first draft token
    anchors = torch.arange(last + 1, device=target.device)
    chain = torch.arange(1, len(draft), device=target.device)
    depths = torch.cat([torch.zeros_like(anchors), chain])
    elements = Elements(torch.cat([anchors, torch.full_like(chain, last)]), depths)
    normed = run_drafter(drafter, sequence, features, elements)[last:]
    return method_of(drafter.config).logits(drafter, normed, tokens[last + 1 : -1])


def _acceptance(drafter: Drafter, target: Target, length: int) -> str:
    """Measure what the target accepts of the head's drafts in a few short greedy answers; `length`:
    tokens of the first prompt."""
    k = default_k(drafter.config)
    count = len(PROMPTS)
    llm = LLM(_plain(target), drafter, k=k, max_batch=count, kv_tokens=count * (length + ROOM))
    params = SamplingParams(max_tokens=MAX_TOKENS)
    measured = measure_acceptance(llm, [[prompt] for prompt in PROMPTS], params)
    rounds = measured["rounds"]
    mean = measured["acceptance_length"]
    if rounds < MIN_ROUNDS:
        raise Skipped(f"{rounds} rounds of drafting are too few: answers are too short")
    found = f"acceptance length {mean:.2f} at K = {k}, {rounds} rounds"
    require(mean >= 1 + NEAR_ZERO, f"{found}: almost nothing is accepted", CAUSES)
    return found
