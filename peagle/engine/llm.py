"""The engine: schedule → verify → accept → draft, until every request is done.

Every round runs one packed target forward over the prompts just admitted and the drafts to verify,
and one packed drafter step. Nothing else touches the models.
"""

import time
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from peagle.config import InputError, InputWarning
from peagle.engine.draft import NewSlots, propose
from peagle.engine.kv_cache import CachedAttend, KVCache, Span, positions
from peagle.engine.request import Chunk, Completion, Request, SamplingParams
from peagle.engine.sampling import verify
from peagle.engine.text import TextStream, end_tokens
from peagle.model.attend import KEY_BLOCK, ROW_TILE
from peagle.model.drafter import Drafter
from peagle.model.packed import pack
from peagle.model.source import load_target
from peagle.model.target import Target

Prompt = str | list[int]
Method = Literal["p-eagle", "eagle3", "none"]


class LLM:
    """A target, alone or with a head that drafts for it.

    >>> llm = LLM("smollm2-135m", head="heads/smollm2-135m-p-eagle")
    >>> llm.generate(["def fib(n):"], SamplingParams(max_tokens=64))[0].text
    """

    def __init__(
        self,
        target: str | Target,
        head: str | Path | Drafter | None = None,
        *,
        k: int | None = None,  # num_speculative_tokens; None: as trained, at most 7
        max_batch: int = 8,  # requests that run together
        deterministic: bool = False,
        **load: Any,  # dtype, device and quantize of load_target
    ) -> None:
        """`deterministic`: rows of one request's target are computed in fixed tiles, so that greedy
        output is bit-identical with and without speculation in any dtype, at max_batch 1 and K ≤ 7.
        What is loaded by name is packed (model/packed.py), for inference alone; objects stay.

        Raises InputError for anything that does not exist, does not fit together, or K < 1.
        """
        self.target = load_target(target, **load).pack() if isinstance(target, str) else target
        self.drafter: Drafter | None = None
        if max_batch < 1:
            raise InputError(f"max_batch {max_batch}: must be at least 1")
        self.k, self.max_batch, self.deterministic = 0, max_batch, deterministic
        self.use(head, k)

    def use(self, head: str | Path | Drafter | None, k: int | None = None) -> None:
        """Draft with another head or K from now on; None decodes with the target alone.

        Warns (InputWarning) when K is above what the head was trained for.
        """
        if k is not None and k < 1:
            raise InputError(f"k {k}: num_speculative_tokens must be at least 1")
        if head is None:
            self.drafter, self.k = None, 0
        else:
            drafter = head if isinstance(head, Drafter) else pack(Drafter.load(head, self.target))
            self.drafter = drafter
            trained = self.drafter.config.depths
            self.k = k or min(7, trained)
            if self.k > trained:
                why = f"K = {self.k}, but the head was trained for {trained} draft tokens"
                # Level 1: one place, so Python shows it once however often K changes.
                warnings.warn(
                    f"{why}: later ones will rarely be accepted", InputWarning, stacklevel=1
                )
        if self.deterministic and self.k >= ROW_TILE:
            most = ROW_TILE - 1
            raise InputError(f"k {self.k}: deterministic mode verifies at most {most} draft tokens")
        self.tap()

    def tap(self) -> None:
        """Have the target work for this head and mode, whoever used the target before."""
        self.target.row_tile = ROW_TILE if self.deterministic else 1
        self.target.tap(() if self.drafter is None else self.drafter.config.feature_layers)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The target's tokenizer."""
        assert self.target.tokenizer is not None
        return self.target.tokenizer

    @property
    def method(self) -> Method:
        """How tokens are drafted."""
        return "none" if self.drafter is None else self.drafter.config.method

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Complete prompts (texts, or token ids), all with one set of parameters or one each."""
        run = Run(self, prompts, params)
        for _ in run:
            pass
        return run.completions()

    def stream(self, prompts: Sequence[Prompt], params: SamplingParams | None = None) -> "Run":
        """Iterate over `Chunk`s of text as they are decided; then `.completions()`."""
        return Run(self, prompts, params)


class Run:
    """One call of generate or stream."""

    def __init__(
        self,
        llm: LLM,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> None:
        self.llm = llm
        llm.tap()
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise InputError(f"{len(params)} sampling parameters for {len(prompts)} prompts")
        self.requests = [
            _request(llm, index, prompt, own)
            for index, (prompt, own) in enumerate(zip(prompts, params, strict=True))
        ]
        self.texts = [TextStream(llm.tokenizer, r.params.stop) for r in self.requests]
        self.generators = [_generator(r.params) for r in self.requests]
        self.waiting, self.running = deque(self.requests), list[Request]()
        self.ends = end_tokens(llm.target)
        rows = min(llm.max_batch, len(prompts))
        longest = max((r.prompt_length + r.params.max_tokens for r in self.requests), default=0)
        room = longest + llm.k + 1
        self.free = list(range(rows))
        self.target_cache = KVCache(rows, room, KEY_BLOCK if llm.deterministic else 1)
        self.drafter_cache = KVCache(rows, room)
        self.seconds = 0.0

    def __iter__(self) -> Iterator[Chunk]:
        while self.waiting or self.running:
            started = time.perf_counter()
            chunks = self.step()
            self.seconds += time.perf_counter() - started
            yield from chunks

    def step(self) -> list[Chunk]:
        """One round for all running requests."""
        batch = self.schedule()
        hidden, features = self.verify(batch)
        chunks, slots = self.accept(batch, hidden, features)
        self.draft(slots)
        self.running = [r for r in batch if r.finish_reason is None]
        return chunks

    def schedule(self) -> list[Request]:
        """Admit waiting requests into free rows; a prompt is run whole in its first round."""
        while self.waiting and self.free:
            request = self.waiting.popleft()
            request.slot = self.free.pop()
            self.running.append(request)
        return self.running

    def verify(self, batch: list[Request]) -> tuple[Tensor, Tensor | None]:
        """Run every request's pending tokens through the target."""
        spans = [Span(r.slot, r.computed, len(r.pending)) for r in batch]
        device = self.llm.target.device
        ids = torch.tensor([token for r in batch for token in r.pending], device=device)
        attend = CachedAttend(self.target_cache, spans)
        return self.llm.target.forward(ids, positions(spans, device), attend)

    def accept(
        self, batch: list[Request], hidden: Tensor, features: Tensor | None
    ) -> tuple[list[Chunk], list[tuple[Request, NewSlots]]]:
        """Keep what the target agrees with, and its next token; collect the drafter's new slots."""
        lengths = [len(r.pending) for r in batch]
        parts = zip(batch, hidden.split(lengths), strict=True)
        judged = [part[-1 - len(r.draft) :] for r, part in parts]
        logits = self.llm.target.logits(torch.cat(judged)).split([len(part) for part in judged])
        states = [None] * len(batch) if features is None else features.split(lengths)
        chunks, slots = [], []
        for request, rows, state in zip(batch, logits, states, strict=True):
            generator = self.generators[request.index]
            accepted, token = verify(rows, request.draft, request.params, generator)
            if request.draft:
                request.stats.count(len(request.draft), accepted)
            start = request.computed
            emitted = [*request.draft[:accepted], token]
            request.draft = []
            chunks += self._emit(request, emitted, accepted)
            request.computed = len(request.tokens) - 1
            if request.finish_reason is not None:
                self.free.append(request.slot)
            elif state is not None:
                ids = request.tokens[start + 1 :]
                slots.append((request, NewSlots(request.slot, start, ids, state[: len(ids)])))
        return chunks, slots

    def draft(self, slots: list[tuple[Request, NewSlots]]) -> None:
        """Propose the next K tokens of every request that goes on; none past the context's end."""
        drafter, k = self.llm.drafter, self.llm.k
        if drafter is None or not slots:
            return
        drafts = propose(drafter, self.drafter_cache, [new for _, new in slots], k)
        for (request, _), draft in zip(slots, drafts, strict=True):
            request.draft = draft[: max(0, self.llm.target.max_context - len(request.tokens))]

    def _emit(self, request: Request, tokens: list[int], accepted: int) -> list[Chunk]:
        """Append tokens one by one, as plain decoding would, until one ends the request."""
        chunks, stream = [], self.texts[request.index]
        for position, token in enumerate(tokens):
            request.tokens.append(token)
            request.drafted_output.append(position < accepted)
            ended = token in self.ends and not request.params.ignore_eos
            text, stopped = ("", False) if ended else stream.push(token)
            if ended or stopped:
                request.finish_reason = "stop"
            elif len(request.output) >= request.params.max_tokens:
                request.finish_reason = "length"
            if request.finish_reason:
                text += stream.finish()
            if text:
                chunks.append(Chunk(request.index, text, position < accepted))
            if request.finish_reason:
                break
        return chunks

    def completions(self) -> list[Completion]:
        """Answers in the order of the prompts, once iteration has ended."""
        done = []
        for request, stream in zip(self.requests, self.texts, strict=True):
            assert request.finish_reason is not None, "iterate to the end first"
            outcome = request.finish_reason, request.stats, request.drafted_output
            done.append(Completion(stream.text, request.output, *outcome))
        return done


def _request(llm: LLM, index: int, prompt: Prompt, params: SamplingParams) -> Request:
    ids = llm.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else list(prompt)
    if not ids:
        raise InputError(f"prompt {index} is empty: give at least one token")
    limit = llm.target.max_context
    room = limit - len(ids)
    if room < 1:
        raise InputError(
            f"prompt {index} has {len(ids)} tokens; {llm.target.name} takes {limit} "
            "with the answer: shorten it"
        )
    if params.max_tokens > room:
        params = replace(params, max_tokens=room)
    return Request(index, len(ids), ids, params)


def _generator(params: SamplingParams) -> torch.Generator:
    generator = torch.Generator()
    generator.seed() if params.seed is None else generator.manual_seed(params.seed)
    return generator
