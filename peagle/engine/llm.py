"""A target with or without a head, and the calls that decode with it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from peagle.backends.base import Backend
from peagle.catalog import model_name
from peagle.engine.drafting import Drafting
from peagle.engine.params import RequestFailure, SamplingParams
from peagle.engine.request import Request
from peagle.engine.run import Completion, Run
from peagle.engine.sampling import Sampler, check_tokens
from peagle.engine.setup import Setup
from peagle.engine.shared import SharedTarget, refuse_settings
from peagle.engine.text import TextStream
from peagle.errors import InputError
from peagle.heads.load import load_drafter
from peagle.methods.registry import method_of
from peagle.model.base_target import BaseTarget
from peagle.model.drafter import Drafter

Prompt = str | list[int]
Params = SamplingParams | Sequence[SamplingParams]  # for all prompts, or one for each


@dataclass(frozen=True, eq=False, init=False, repr=False)
class LLM(Setup):
    """A target with a head that drafts for it, or with lookup, or alone. It never changes: `use`
    makes another one over the same target. Several LLMs over one target may decode in turns, and
    several threads may use one LLM.

    >>> llm = LLM("smollm2-135m", head="heads/smollm2-135m-p-eagle")
    >>> llm.generate(["def fib(n):"], SamplingParams(max_tokens=64))[0].text
    """

    def __init__(  # noqa: PLR0913 (the settings of an engine)
        self,
        target: str | BaseTarget | SharedTarget,
        head: str | Path | Drafter | None = None,
        *,
        k: int | None = None,  # num_speculative_tokens: chains of k tokens
        nodes: int | None = None,  # maximum tree size; with neither, the budget decides every round
        lookup: bool | None = None,  # lookup drafts, too; None: not in chains
        max_batch: int | None = None,  # requests that run together; None: by device and memory
        kv_tokens: int | None = None,  # tokens of KV cache, for all of them; None: by free memory
        deterministic: bool = False,
        quantize: str | None = None,
        backend: Backend | None = None,  # None: the fastest for the target's device and dtype
        **load: Any,  # dtype and device of load_target
    ) -> None:
        """`deterministic`: the target is computed in fixed tiles of rows, so that greedy output is
        bit-identical with and without speculation, alone and in any company, in any dtype.
        `quantize`: "int8" or "int4" weights in the target's layers, where it is loaded by name, on
        a CPU.

        Raises InputError for anything that does not exist, does not fit together, or K < 1. Warns
        (InputWarning) when K is above what the head was trained for.
        """
        if isinstance(target, SharedTarget):
            refuse_settings(quantize=quantize, backend=backend, deterministic=deterministic, **load)
            shared = target
        else:
            shared = SharedTarget(target, quantize, backend, deterministic=deterministic, **load)
        drafter = head if isinstance(head, Drafter | None) else load_drafter(head, shared.target)
        method = None if drafter is None else method_of(drafter.config)
        drafting = Drafting.resolve(method, k, nodes, lookup)
        super().__init__(shared, drafter, drafting, max_batch, kv_tokens)

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

        Raises and warns as the constructor does.
        """
        batch = self.asked_batch if max_batch is None else max_batch
        room = self.kv_tokens if kv_tokens is None else kv_tokens
        return LLM(
            self.shared, head, k=k, nodes=nodes, lookup=lookup, max_batch=batch, kv_tokens=room
        )

    def load_head(self, name: str | Path, *, force: bool = False) -> Drafter:
        """A head for this target; see `load_drafter`."""
        return load_drafter(name, self.target, force=force)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The target's tokenizer."""
        assert self.target.tokenizer is not None
        return self.target.tokenizer

    def warm_up(self) -> None:
        """Make the engine and prepare grammars, so that the first request waits for neither."""
        assert self.engine
        self.shared.grammars.warm_up()

    def check_text(self, text: str, field: str) -> None:
        """Raises InputError of `field` for a text that cannot fit, or be tokenised."""
        if len(text) > self.target.max_context and len(text) > self.shared.max_characters:
            raise self._too_long(f"has {len(text)} characters", field)
        try:
            text.encode()
        except UnicodeEncodeError as error:  # half of a surrogate pair, a byte that is no UTF-8
            raise InputError("is no valid Unicode text", field=field) from error

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
        room = f"{self.target.max_context} tokens of context with the answer"
        why = f"{size}; {model_name(self.target.name)} takes {room}"
        return InputError(why, field=field, fix="shorten it")

    def make_requests(
        self, ids: list[int], params: SamplingParams, first: int = 0, number: int = 0
    ) -> list[Request]:
        """Requests for the n answers to one prompt, numbered from `first`, ready for `Engine.add`.

        Any thread may call it: compiling a grammar may take seconds. Raises InputError of
        `prompt[number]` when a request can never run.
        """
        room = self.target.max_context - len(ids)
        params = replace(params, max_tokens=min(params.max_tokens, room))
        self.engine.scheduler.check(len(ids) + params.max_tokens, number)
        return [self._request(first + i, ids, copy) for i, copy in enumerate(params.copies())]

    def _request(self, index: int, ids: list[int], params: SamplingParams) -> Request:
        generator = torch.Generator()
        seed = generator.seed() if params.seed is None else params.seed
        generator.manual_seed(seed)
        matcher = self.shared.grammars.matcher(params, ids)
        sampler = Sampler(params, ids, generator, len(self.target.embedding), matcher)
        text = TextStream(self.tokenizer, params.stop)
        return Request(index, len(ids), list(ids), params, sampler, text)

    def generate(self, prompts: Sequence[Prompt], params: Params | None = None) -> list[Completion]:
        """Complete prompts (texts, or token ids) or one text, all with one set of parameters or one
        each; with n > 1, the first prompt's n answers come first.

        Raises RequestFailure, once all have ended, when one of them could not go on; `stream` gives
        the finish_reason of each.
        """
        answers = [answer for _, answer in sorted(self.stream(prompts, params).ended())]
        for number, answer in enumerate(answers):
            if answer.failure is not None:
                raise RequestFailure(f"answer {number}: {answer.failure}")
        return answers

    def stream(self, prompts: Sequence[Prompt], params: Params | None = None) -> Run:
        """Iterate over `Chunk`s of text as they are decided; then `.completions()`."""
        prompts = [prompts] if isinstance(prompts, str) else prompts
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            why = f"{len(params)} sampling parameters for {len(prompts)} prompts"
            raise InputError(why, field="params", fix="give one for all, or one for each")
        prompts_ids = [self.prompt_ids(prompt, number) for number, prompt in enumerate(prompts)]
        requests = list[Request]()
        for number, (ids, each) in enumerate(zip(prompts_ids, params, strict=True)):
            requests += self.make_requests(ids, each, len(requests), number)
        return Run(self.engine, requests)
