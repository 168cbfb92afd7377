"""A target with or without a head, and the calls that decode with it."""

import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from peagle.config import InputError, InputWarning
from peagle.engine.blocks import BLOCK
from peagle.engine.costs import draft_curve, verify_curve
from peagle.engine.depth import AdaptiveDepth, Curve
from peagle.engine.engine import Engine, Settings
from peagle.engine.grammar import Grammars
from peagle.engine.memory import MAX_BATCH, kv_tokens
from peagle.engine.request import Chunk, Completion, Request, RequestFailure, SamplingParams
from peagle.model.drafter import Drafter
from peagle.model.lease import TargetInUse
from peagle.model.packed import pack
from peagle.model.source import load_target
from peagle.model.target import Target

Prompt = str | list[int]
Method = Literal["p-eagle", "eagle3", "none"]


class LLM:
    """A target, alone or with a head that drafts for it. Not thread-safe; several LLMs over one
    target decode one after the other, and TargetInUse is raised where they would not.

    >>> llm = LLM("smollm2-135m", head="heads/smollm2-135m-p-eagle")
    >>> llm.generate(["def fib(n):"], SamplingParams(max_tokens=64))[0].text
    """

    def __init__(  # noqa: PLR0913 (what an engine is made of)
        self,
        target: str | Target,
        head: str | Path | Drafter | None = None,
        *,
        k: int | None = None,  # num_speculative_tokens; None: as many as pay, round by round
        max_batch: int = MAX_BATCH["cpu"],  # requests that run together
        kv_tokens: int | None = None,  # of KV cache, for all of them; None: by free memory
        deterministic: bool = False,
        **load: Any,  # dtype, device and quantize of load_target
    ) -> None:
        """`deterministic`: the target is computed in fixed tiles of rows, so that greedy output is
        bit-identical with and without speculation, alone and in any company, in any dtype.
        What is loaded by name is made ready for inference alone (model/lean.py, model/packed.py);
        objects stay.

        Raises InputError for anything that does not exist, does not fit together, or K < 1.
        """
        if isinstance(target, str):
            target = load_target(target, **load).lean().pack()
        self.target = target
        self.drafter: Drafter | None = None
        for name, value in (("max_batch", max_batch), ("kv_tokens", kv_tokens)):
            if value is not None and value < 1:
                raise InputError(f"{name} {value}: must be at least 1")
        self.k, self.max_batch, self.deterministic = 0, max_batch, deterministic
        self.adaptive, self.kv_tokens = False, kv_tokens
        self._grammars = Grammars(self.target)
        self._engine: Engine | None = None
        self._verify: Curve | None = None  # what the target costs: measured once
        self.use(head, k)

    def use(self, head: str | Path | Drafter | None, k: int | None = None) -> None:
        """Draft with another head or K from now on; None decodes with the target alone.

        Raises TargetInUse while a stream runs. Warns (InputWarning) when K is above what the head
        was trained for.
        """
        if k is not None and k < 1:
            raise InputError(f"k {k}: num_speculative_tokens must be at least 1")
        if self._engine is not None and not self._engine.idle:
            why = "a stream of this LLM runs: finish or close it before another head is used"
            raise TargetInUse(f"target {self.target.name}: {why}")
        if head is not None:
            head = head if isinstance(head, Drafter) else self.load_head(head)
            self.target.check_layers(head.config.feature_layers)
        self._engine = None
        self.drafter = head
        if head is None:
            self.k, self.adaptive = 0, False
        else:
            trained = head.config.depths
            self.k, self.adaptive = k or min(7, trained), k is None
            if self.k > trained:
                why = f"K = {self.k}, but the head was trained for {trained} draft tokens"
                # Level 1: one place, so Python shows it once however often K changes.
                warnings.warn(
                    f"{why}: later ones will rarely be accepted", InputWarning, stacklevel=1
                )

    def load_head(self, name: str | Path, *, force: bool = False) -> Drafter:
        """A head for this target, made ready for inference alone. `force` and what is raised: as
        `Drafter.load` has them."""
        return pack(Drafter.load(name, self.target, force=force))

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The target's tokenizer."""
        assert self.target.tokenizer is not None
        return self.target.tokenizer

    @property
    def method(self) -> Method:
        """How tokens are drafted."""
        return "none" if self.drafter is None else self.drafter.config.method

    @property
    def engine(self) -> Engine:
        """What decodes: made when it is first needed, and again when anything has changed. Raises
        TargetInUse when it has to be made while the target decodes for another LLM or thread."""
        if self._engine is not None and self._engine.settings.max_batch == self.max_batch:
            return self._engine
        each = self.target.max_context + self.k + BLOCK  # nothing a request may ever need
        room = kv_tokens(self.target, self.drafter, self.max_batch * each, self.kv_tokens)
        settings = Settings(self.max_batch, room, self.k, deterministic=self.deterministic)
        engine = Engine(self.target, self.drafter, settings, self._grammars)
        with engine.turn():  # forwards are timed
            engine.depths = self._adaptive_depth()
        self._engine = engine
        return engine

    def _adaptive_depth(self) -> AdaptiveDepth | None:
        if self.drafter is None or not self.adaptive:
            return None
        most = self.max_batch * (self.k + 1)
        if self._verify is None or self._verify.rows[-1] < most:
            self._verify = verify_curve(self.target, most)
        method, draft = self.drafter.config.method, draft_curve(self.drafter, most)
        return AdaptiveDepth(method, self.k, self._verify, draft)

    @cached_property
    def max_characters(self) -> int:
        """Characters of the longest prompt that could fit: a bound before it is tokenised."""
        longest = max(map(len, self.tokenizer.get_vocab()))
        return self.target.max_context * longest

    def check_text(self, text: str, name: str) -> None:
        """Raises InputError, which calls the text `name`, for one that cannot fit."""
        if len(text) > self.max_characters:
            raise InputError(
                f"{name} has {len(text)} characters; {self.target.name} takes "
                f"{self.target.max_context} tokens with the answer: shorten it"
            )

    def prompt_ids(self, prompt: Prompt, number: int = 0) -> list[int]:
        """Token ids of a prompt that the target can run.

        Raises InputError, which names the prompt by its `number`, for any other.
        """
        if isinstance(prompt, str):
            self.check_text(prompt, f"prompt {number}")
            ids = self.tokenizer(prompt)["input_ids"]
        else:
            ids = list(prompt)
        if not ids:
            raise InputError(f"prompt {number} is empty: give at least one token")
        limit, most = self.target.max_context, len(self.target.embedding) - 1
        if len(ids) >= limit:
            raise InputError(
                f"prompt {number} has {len(ids)} tokens; {self.target.name} takes {limit} "
                "with the answer: shorten it"
            )
        if wrong := [token for token in ids if not 0 <= token <= most]:
            why = f"the target's token ids are 0 to {most}"
            raise InputError(f"prompt {number} has token {wrong[0]}: {why}")
        return ids

    def requests(self, ids: list[int], params: SamplingParams, first: int = 0) -> list[Request]:
        """What the engine is asked for one prompt: a request for each of n answers, numbered from
        `first`."""
        most = min(params.max_tokens, self.target.max_context - len(ids))
        return [
            Request(first + i, len(ids), list(ids), replace(own, max_tokens=most))
            for i, own in enumerate(params.copies())
        ]

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
        run = Run(self, prompts, params)
        for _ in run:
            pass
        for request in run.requests:
            if request.failure is not None:
                raise RequestFailure(f"prompt {request.index}: {request.failure}")
        return run.completions()

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
        self.requests = list[Request]()
        for number, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
            ids = llm.prompt_ids(prompt, number)
            self.requests += llm.requests(ids, own, len(self.requests))
        self.engine, self.seconds, self._begun = llm.engine, 0.0, False
        for request in self.requests:
            self.engine.prepare(request)

    def __iter__(self) -> Iterator[Chunk]:
        """Left early, the requests that still run are cancelled."""
        try:
            while any(request.finish_reason is None for request in self.requests):
                yield from self.step()
        finally:
            self.close()

    def close(self) -> None:
        """Cancel the requests that still run, so that another LLM can decode over the target.
        Iteration does it by itself; whoever calls `step` and stops early must."""
        if self._begun:
            for request in self.requests:
                self.engine.cancel(request)

    def step(self) -> list[Chunk]:
        """One round of the engine; what it said of these requests. Raises TargetInUse while another
        LLM or thread decodes over the target."""
        started = time.perf_counter()
        if not self._begun:
            self.engine.add(*self.requests)
            self._begun = True
        self.engine.step()
        self.seconds += time.perf_counter() - started
        said = [chunk for request in self.requests for chunk in request.said]
        for request in self.requests:
            request.said = []
        return said

    def completions(self) -> list[Completion]:
        """Answers in the order of the prompts, once iteration has ended."""
        done = []
        for request in self.requests:
            assert request.finish_reason is not None, "iterate to the end first"
            done.append(
                Completion(
                    request.text.text,
                    request.output,
                    request.finish_reason,
                    request.stats,
                    request.drafted_output,
                    None if request.params.logprobs is None else request.logprobs,
                    request.failure,
                )
            )
        return done
