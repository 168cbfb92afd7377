"""A target with or without a head, and the calls that decode with it."""

import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from peagle.backends.base import Backend
from peagle.backends.batch import BLOCK, blocks_of
from peagle.engine.budget import Budget, Curve
from peagle.engine.completion import Completion
from peagle.engine.costs import draft_curve
from peagle.engine.draft import Proposer
from peagle.engine.drafting import Drafting, Mode, check_options
from peagle.engine.engine import Engine, Settings
from peagle.engine.memory import default_max_batch, kv_tokens
from peagle.engine.params import RequestFailure, SamplingParams
from peagle.engine.request import Chunk, Request
from peagle.engine.sampling import Sampler, check_tokens
from peagle.engine.shared import SharedTarget, load_quantized
from peagle.engine.text import TextStream
from peagle.errors import InputError, InputWarning
from peagle.methods.base import Method
from peagle.methods.keys import default_k
from peagle.methods.load import load_drafter
from peagle.methods.registry import method_of
from peagle.model.drafter import Drafter
from peagle.model.loader import load_target
from peagle.model.target import Target
from peagle.shown import model_name

Prompt = str | list[int]


class LLM:
    """A target with a head that drafts for it, or with lookup, or alone. It never changes: `use`
    makes another one over the same target. Several LLMs over one target may decode in turns, and
    several threads may use one LLM.

    >>> llm = LLM("smollm2-135m", head="heads/smollm2-135m-p-eagle")
    >>> llm.generate(["def fib(n):"], SamplingParams(max_tokens=64))[0].text
    """

    target: Target
    drafter: Drafter | None
    drafting: Drafting
    k: int  # depth of the head's drafts, at most where the budget decides; 0 without a head
    nodes: int | None  # of a draft tree, at most; None: chains
    max_batch: int  # requests that run together
    kv_tokens: int | None  # of KV cache, for all of them; None: by free memory
    _shared: SharedTarget
    _asked_batch: int | None

    def __init__(  # noqa: PLR0913 (what an engine is made of)
        self,
        target: str | Target,
        head: str | Path | Drafter | None = None,
        *,
        k: int | None = None,  # num_speculative_tokens: chains as long as that
        nodes: int | None = None,  # trees as large as that; neither: what pays, round by round
        lookup: bool | None = None,  # what followed before is drafted, too; None: not in chains
        max_batch: int | None = None,  # requests that run together; None: by device and memory
        kv_tokens: int | None = None,  # of KV cache, for all of them; None: by free memory
        deterministic: bool = False,
        quantize: str | None = None,
        backend: Backend | None = None,  # None: the fastest for the target's device and dtype
        **load: Any,  # dtype and device of load_target
    ) -> None:
        """`deterministic`: the target is computed in fixed tiles of rows, so that greedy output is
        bit-identical with and without speculation, alone and in any company, in any dtype.
        `quantize`: "int8" or "int4" weights in the target's layers, where it is loaded by name, on
        a CPU.

        Raises InputError for anything that does not exist, does not fit together, or K < 1.
        """
        own = isinstance(target, str)
        if isinstance(target, str) and quantize is not None:
            target = load_quantized(target, quantize, **load)
        elif isinstance(target, str):
            target = load_target(target, **load)
        elif quantize is not None:
            raise InputError(f"quantize {quantize!r}: give the target by name, it is loaded here")
        if deterministic and backend is not None:
            raise InputError("deterministic True: make the backend with exact=True instead")
        loaded = SharedTarget(target, own=own, deterministic=deterministic, backend=backend)
        self._fill(loaded, head, k, nodes, lookup, max_batch, kv_tokens)

    def _fill(  # noqa: PLR0913, PLR0917 (what an engine is made of)
        self,
        loaded: SharedTarget,
        head: str | Path | Drafter | None,
        k: int | None,
        nodes: int | None,
        lookup: bool | None,
        max_batch: int | None,
        kv_tokens: int | None,
    ) -> None:
        for name, value in {"max_batch": max_batch, "kv_tokens": kv_tokens}.items():
            if value is not None and value < 1:
                raise InputError(f"{name} {value}: must be at least 1")
        check_options(k, nodes)  # before a head is loaded
        target = loaded.target
        drafter = head if isinstance(head, Drafter | None) else load_drafter(head, target)
        method, most = None, 0
        if drafter is not None:
            target.check_layers(drafter.config.feature_layers)
            method, most = method_of(drafter.config), k or default_k(drafter.config)
            _warn_of_depth(most, drafter.config.depths)
        drafting = _drafting(k, nodes, lookup, method)
        vars(self).update(
            _shared=loaded,
            target=target,
            drafter=drafter,
            drafting=drafting,
            k=most,
            nodes=drafting.max_nodes,
            _asked_batch=max_batch,
            max_batch=max_batch or default_max_batch(target, drafter, kv_tokens),
            kv_tokens=kv_tokens,
        )

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{name}: an LLM does not change; `use` makes another one")

    def use(
        self,
        head: str | Path | Drafter | None,
        k: int | None = None,
        *,
        nodes: int | None = None,
        lookup: bool | None = None,
        max_batch: int | None = None,
        kv_tokens: int | None = None,
    ) -> "LLM":
        """Another LLM over the same target, with this head and K or tree; None drafts by lookup, or
        nothing where `lookup` is False. `max_batch` and `kv_tokens` stay as they are here where
        they are not given.

        Raises InputError as the constructor does. Warns (InputWarning) when K is above what the
        head was trained for.
        """
        other = object.__new__(LLM)
        batch = self._asked_batch if max_batch is None else max_batch
        tokens = self.kv_tokens if kv_tokens is None else kv_tokens
        other._fill(self._shared, head, k, nodes, lookup, batch, tokens)
        return other

    def load_head(self, name: str | Path, *, force: bool = False) -> Drafter:
        """A head for this target; see `load_drafter`."""
        return load_drafter(name, self.target, force=force)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The target's tokenizer."""
        assert self.target.tokenizer is not None
        return self.target.tokenizer

    @property
    def engine(self) -> Engine:
        """What decodes: made when it is first needed, once for all threads."""
        with self._shared.lock:
            return self._engine

    @cached_property
    def _engine(self) -> Engine:
        most = max(self.k, self.nodes or 0)
        longest = self.target.max_context + most + BLOCK  # nothing a request may ever need
        room = kv_tokens(self.target, self.drafter, self.max_batch * longest, self.kv_tokens)
        settings = Settings(self.max_batch, room, self.k, self.nodes, self.drafting.lookup)
        proposer = None
        if self.drafter is not None:
            proposer = self._shared.proposer(self.drafter, blocks_of(room))
        budget = self._budget(proposer) if self.drafting.mode == "auto" else None
        return Engine(self.target, self._shared.model, settings, proposer, budget)

    def _budget(self, proposer: Proposer | None) -> Budget:
        most = self.max_batch + max(self.max_batch * self.k, self.nodes or 0)
        verify = self._shared.verify_curve(most)
        if proposer is None:
            return Budget(lambda *_: [], 0, verify, Curve({1: 0.0}))
        method, draft = proposer.method, draft_curve(proposer.model, most)
        return Budget(method.passes, self.k, verify, draft)

    def warm_up(self) -> None:
        """Make ready what the first request would wait for: the engine, and grammars."""
        assert self.engine
        self._shared.grammars.warm_up()

    @cached_property
    def max_characters(self) -> int:
        """Characters of the longest prompt that could fit: a bound before it is tokenised."""
        longest = max(map(len, self.tokenizer.get_vocab()))
        return self.target.max_context * longest

    def check_text(self, text: str, field: str) -> None:
        """Raises InputError of `field` for a text that cannot fit."""
        if len(text) > self.max_characters:
            raise self._too_long(f"has {len(text)} characters", field)

    def prompt_ids(self, prompt: Prompt, number: int = 0) -> list[int]:
        """Token ids of a prompt that the target can run.

        Raises InputError of `prompt[number]` for any other.
        """
        field = f"prompt[{number}]"
        if isinstance(prompt, str):
            self.check_text(prompt, field)
            ids = self.tokenizer(prompt)["input_ids"]
        else:
            ids = list(prompt)
        if not ids:
            raise InputError("is empty", field=field, fix="give at least one token")
        if len(ids) >= self.target.max_context:
            raise self._too_long(f"has {len(ids)} tokens", field)
        check_tokens(ids, len(self.target.embedding), field)
        return ids

    def _too_long(self, size: str, field: str) -> InputError:
        room = f"{self.target.max_context} tokens with the answer"
        why = f"{size}; {model_name(self.target.name)} takes {room}"
        return InputError(why, field=field, fix="shorten it")

    def make_requests(
        self, ids: list[int], params: SamplingParams, first: int = 0
    ) -> list[Request]:
        """Requests for the n answers to one prompt, numbered from `first`, ready for `Engine.add`.

        Any thread may call it: compiling a grammar may take seconds. Raises InputError when a
        request can never run.
        """
        room = self.target.max_context - len(ids)
        params = replace(params, max_tokens=min(params.max_tokens, room))
        self.engine.scheduler.check(len(ids) + params.max_tokens, first)
        return [self._request(first + i, ids, copy) for i, copy in enumerate(params.copies())]

    def _request(self, index: int, ids: list[int], params: SamplingParams) -> Request:
        generator = torch.Generator()
        if params.seed is None:
            generator.seed()
        else:
            generator.manual_seed(params.seed)
        matcher = self._shared.grammars.matcher(params, ids)
        sampler = Sampler(params, ids, generator, len(self.target.embedding), matcher)
        text = TextStream(self.tokenizer, params.stop)
        return Request(index, len(ids), list(ids), params, sampler, text)

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Complete prompts (texts, or token ids), all with one set of parameters or one each; with
        n > 1, the first prompt's n answers come first.

        Raises RequestFailure, once all have ended, when one of them could not go on; `stream` tells
        them apart by their finish_reason.
        """
        answers = dict(Run(self, prompts, params).ended())
        return [answers[number] for number in sorted(answers)]

    def stream(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> "Run":
        """Iterate over `Chunk`s of text as they are decided; then `.completions()`."""
        return Run(self, prompts, params)


class Run:
    """One call of generate or stream. `seconds` is the time spent in the engine."""

    def __init__(
        self,
        llm: LLM,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> None:
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise InputError(f"{len(params)} sampling parameters for {len(prompts)} prompts")
        prompts_ids = [llm.prompt_ids(prompt, number) for number, prompt in enumerate(prompts)]
        self.requests = list[Request]()
        for ids, each in zip(prompts_ids, params, strict=True):
            self.requests += llm.make_requests(ids, each, len(self.requests))
        self.engine = llm.engine
        self.seconds = 0.0
        self._begun = False

    def __iter__(self) -> Iterator[Chunk]:
        """Left early, the requests that still run are cancelled."""
        try:
            while any(request.finish_reason is None for request in self.requests):
                yield from self.step()
            yield from self._fetch()  # the step of another stream may have been the last
        finally:
            self.close()

    def close(self) -> None:
        """Cancel the requests that still run. Iteration does it by itself; whoever calls `step` and
        stops early must."""
        if self._begun:
            for request in self.requests:
                self.engine.cancel(request)

    def step(self) -> list[Chunk]:
        """One round of the engine; what it emitted for these requests."""
        started = time.perf_counter()
        if not self._begun:
            self.engine.add(*self.requests)
            self._begun = True
        self.engine.step()
        self.seconds += time.perf_counter() - started
        return self._fetch()

    def _fetch(self) -> list[Chunk]:
        return [chunk for request in self.requests for chunk in self.engine.fetch(request)]

    def ended(self) -> Iterator[tuple[int, Completion]]:
        """Each answer when it ends, with its number. Raises RequestFailure, once all have ended,
        when one of them could not go on."""
        left = self.requests
        with closing(self):
            while left:
                self.step()
                ended = [request for request in left if request.finish_reason is not None]
                left = [request for request in left if request not in ended]
                for request in ended:
                    if request.failure is None:
                        yield request.index, _completion(request)
        for request in self.requests:
            if request.failure is not None:
                raise RequestFailure(f"prompt {request.index}: {request.failure}")

    def completions(self) -> list[Completion]:
        """Answers in the order of the prompts, once iteration has ended."""
        return [_completion(request) for request in self.requests]


def _completion(request: Request) -> Completion:
    assert request.finish_reason is not None, "iterate to the end first"
    return Completion(
        request.text.text,
        request.output,
        request.finish_reason,
        request.stats,
        request.drafted_output,
        None if request.params.logprobs is None else request.logprobs,
        request.failure,
    )


def _warn_of_depth(k: int, trained: int | None) -> None:
    if trained is not None and k > trained:
        why = f"K = {k}, but the head was trained for {trained} draft tokens"
        # Level 1: one place, so Python shows it once however often K changes.
        warnings.warn(f"{why}: later ones will rarely be accepted", InputWarning, stacklevel=1)


def _drafting(
    k: int | None, nodes: int | None, lookup: bool | None, method: Method | None
) -> Drafting:
    """What options make an engine draft, with a head of `method` or without one. Raises InputError
    for what cannot be."""
    if method is None and lookup is None:
        lookup = k is None
    if method is None and not lookup:
        return Drafting()
    if lookup and k is not None:
        raise InputError("lookup True: needs trees: leave out `k`")
    if nodes is not None and method is not None and not (method.parallel or lookup):
        why = f"{method.title} drafts chains"
        raise InputError(f"nodes {nodes}: {why}: give `k`, or a head of another method")
    name = "lookup" if method is None else method.name
    if k is not None:
        return Drafting(name, "chain", k)
    mode: Mode = "auto" if nodes is None else "tree"
    return Drafting(name, mode, nodes or 0, lookup is not False)
