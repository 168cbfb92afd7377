"""Draft trees without an engine: dense attention, no cache, one sequence."""

import torch
from tiny import features_of
from torch import Tensor

from peagle.engine.budget import Calibration
from peagle.engine.llm import LLM
from peagle.engine.params import SamplingParams
from peagle.engine.request import Stats
from peagle.methods.registry import method_of
from peagle.model.attention import CausalAttend
from peagle.model.drafter import Drafter
from peagle.model.target import Target

Path = tuple[int, ...]  # draft tokens


class Uncalibrated(Calibration):
    """Believes the drafter, as the reference does."""

    def __call__(self, depth: int, prob: float) -> float:
        return prob


def place_states(drafter: Drafter, target: Target, tokens: list[int], k: int) -> Tensor:
    """Normed hidden states (k, D) of the places after `tokens`."""
    ids = torch.tensor(tokens[1:] + [drafter.config.mask_token_id] * (k - 1))
    real = drafter.project(features_of(target, drafter, tokens[:-1]))
    features = torch.cat([real, drafter.placeholders(k - 1)])
    out = drafter(ids, features, torch.arange(len(ids)), CausalAttend())
    return out.normed[len(tokens) - 2 :]


def children(drafter: Drafter, states: Tensor, newest: int, path: Path) -> dict[int, float]:
    """The 16 likeliest tokens after a path, and their probabilities given the token before. With a
    correction only its candidates are offered."""
    if len(path) == len(states):
        return {}
    before = torch.tensor([[newest, *path][-1]])
    state = states[len(path)][None]
    method = method_of(drafter.config)
    probs = method.logits(drafter, state, before)[0].softmax(-1)
    if drafter.correction is not None:
        offered = method.logits(drafter, state, None)[0].topk(drafter.correction.candidates).indices
        probs = torch.zeros_like(probs).scatter(0, offered, probs[offered])
    best = probs.topk(16)
    return dict(zip(drafter.target_ids[best.indices].tolist(), best.values.tolist(), strict=True))


def likeliest_paths(drafter: Drafter, states: Tensor, newest: int, nodes: int) -> set[Path]:
    """One after another the likeliest path that is a known one and a token more."""
    known: dict[Path, float] = {(): 1.0}
    longer = dict[Path, float]()
    last: Path = ()
    while len(known) <= nodes:
        for token, prob in children(drafter, states, newest, last).items():
            longer[*last, token] = known[last] * prob
        last = max(longer, key=lambda path: longer[path])
        known[last] = longer.pop(last)
    return set(known) - {()}


@torch.no_grad()
def reference(  # noqa: PLR0913, PLR0917 (all that a tree depends on)
    target: Target, drafter: Drafter, prompt: list[int], length: int, nodes: int, k: int
) -> tuple[list[int], Stats]:
    """The greedy answer, and what rounds drafted and accepted."""
    forward = target.forward(torch.tensor(prompt), torch.arange(len(prompt)), CausalAttend())
    tokens, stats = [*prompt, int(target.logits(forward.hidden)[-1].argmax())], Stats()
    while len(tokens) < len(prompt) + length:
        states = place_states(drafter, target, tokens, min(k, target.max_context - len(tokens)))
        paths = likeliest_paths(drafter, states, tokens[-1], nodes)
        emitted = list[int]()
        while not emitted or tuple(emitted) in paths:
            ids = torch.tensor(tokens + emitted)
            hidden = target.forward(ids, torch.arange(len(ids)), CausalAttend()).hidden
            emitted.append(int(target.logits(hidden)[-1].argmax()))
        stats.rounds += 1
        stats.drafted += len(paths)
        depth = max(map(len, paths))
        stats.accepted += [0] * (depth - len(stats.accepted))
        for place in range(len(emitted) - 1):
            stats.accepted[place] += 1
        tokens += emitted
    return tokens[len(prompt) :][:length], stats


def accepted_as_the_reference(
    target: Target, drafter: Drafter, prompts: list[list[int]], nodes: int, k: int
) -> int:
    """Check that the engine's trees are the reference's: tokens, rounds, drafts, what is accepted.
    Returns how many draft tokens were accepted."""
    llm = LLM(target, drafter, nodes=nodes, lookup=False)
    llm.engine.budget.calibration = Uncalibrated()
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    accepted = 0
    for prompt in prompts:
        done = llm.generate([prompt], params)[0]
        wanted, stats = reference(target, drafter, prompt, 24, nodes, k)
        assert done.token_ids == wanted
        assert (done.stats.rounds, done.stats.drafted) == (stats.rounds, stats.drafted)
        assert done.stats.accepted == stats.accepted
        accepted += sum(stats.accepted)
    return accepted
