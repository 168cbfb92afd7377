"""Data from nothing: the target writes the user's turns itself, then answers them.

It is given the start of a user turn of its own chat template, perhaps with a few words that set the
kind, and samples until it ends that turn. Draw i depends on the seed and i only, and whether it is
kept on the records before it: a run that was stopped goes on as if it never had been.
"""

import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from peagle.data.chat import Message, Style, prompt_ids, render, system_turn
from peagle.data.lines import append, open_to_append, read_back
from peagle.data.novelty import Kept
from peagle.data.spoken import to_message
from peagle.data.starters import STARTERS
from peagle.engine.llm import LLM
from peagle.engine.params import SamplingParams
from peagle.engine.request import Completion
from peagle.engine.text import end_tokens
from peagle.errors import InputError

SENTINEL = "peagleuserturn"
SHORTEST = 4  # tokens the target adds to a starter
PATIENCE = 200  # drafts refused in a row
MIX: Mapping[str, float] = MappingProxyType({"chat": 0.5, "code": 0.25, "math": 0.25})


@dataclass(frozen=True, slots=True)
class SynthConfig:
    """What is written, and how."""

    count: Annotated[int, "Number of records that the file is to hold."] = 1000
    mix: Mapping[str, float] = field(default_factory=lambda: MIX)  # kind → share, as weights
    user: SamplingParams = SamplingParams(temperature=0.9, top_p=0.95)  # how user turns are sampled
    max_tokens: Annotated[int, "Maximum number of tokens of an answer, which is greedy."] = 512
    seed: Annotated[int, "Seed of the random number generator."] = 0
    system: Annotated[str | None, "System prompt of every conversation. Default: none."] = None
    template_args: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.count < 1:
            raise InputError(f"count {self.count}: must be at least 1")
        if self.user.temperature == 0:
            raise InputError("temperature 0: user turns must be sampled, or all are the same")
        for kind, share in self.mix.items():
            if kind not in STARTERS or not 0 <= share < float("inf"):
                raise InputError(f"mix {kind}={share}: give {', '.join(STARTERS)} shares from 0 on")
        if not sum(self.mix.values()):
            raise InputError("mix: no kind has a share above 0")

    @property
    def quotas(self) -> dict[str, int]:
        """Records of each kind: shares of the count, what is left over to the largest rests."""
        exact = {k: self.count * w / sum(self.mix.values()) for k, w in self.mix.items()}
        quotas = {kind: int(share) for kind, share in exact.items()}
        by_rest = sorted(exact, key=lambda kind: quotas[kind] - exact[kind])
        for kind in by_rest[: self.count - sum(quotas.values())]:
            quotas[kind] += 1
        return quotas


class SynthReport(NamedTuple):
    """What is in the file now, and what this run left out."""

    written: int  # by this run
    kinds: Counter[str]  # records in the file
    refused: Counter[str]  # drafts, by reason


class UserTurn(NamedTuple):
    """Where the template has the user speak: the text before, and what ends it."""

    start: str
    end_ids: frozenset[int]
    end_text: str | None  # where the template's own mark is not a special token


class Draw(NamedTuple):
    """One attempt."""

    number: int
    kind: str
    starter: str
    seed: int


class Draft(NamedTuple):
    """What the target wrote for a draw."""

    draw: Draw
    text: str  # the user's words
    prompt: list[int]  # up to where the answer begins
    fault: str | None = None  # why it cannot be used, whatever the others are


def user_turn(
    tokenizer: PreTrainedTokenizerBase, system: list[Message], style: Style, ends: set[int]
) -> UserTurn:
    """Cut the template where the user speaks; `ends` are the target's own end tokens.

    Raises InputError when the template does not show the user's words once, and something after.
    """
    asked = [*system, {"role": "user", "content": SENTINEL}]
    text = render(tokenizer, asked, answer=True, style=style)
    start, *rest = text.split(SENTINEL)
    if len(rest) != 1 or not rest[0].strip():
        why = "the chat template cannot be cut where the user speaks"
        raise InputError(f"{why}: name another with --chat-template FILE, or use data regenerate")
    after = rest[0].strip()
    first = tokenizer(after, add_special_tokens=False)["input_ids"][0]
    known = tokenizer.added_tokens_decoder.get(first)
    if known is not None and known.special:
        return UserTurn(start, frozenset(ends | {first}), None)
    return UserTurn(start, frozenset(ends), after.split()[0])


def synthesize(
    llm: LLM,
    output: Path,
    config: SynthConfig | None = None,
    on_record: Callable[[int, int], None] = lambda done, total: None,
) -> SynthReport:
    """Have the target write prompts and answer them, until `output` holds `config.count` records,
    each a line with `record`, `kind`, `draw`, `messages`, `prompt_ids`, `answer_ids`.

    Raises InputError when the template cannot be cut, `output` holds anything else or is being
    written by another process, or 200 drafts in a row cannot be used.
    """
    return _Synthesis(llm, config or SynthConfig()).run(output, on_record)


def synth_for_run(
    llm: LLM,
    folder: Path,
    config: SynthConfig | None = None,
    on_record: Callable[[int, int], None] = lambda done, total: None,
) -> Path:
    """`data.jsonl` in a training run's folder, made or completed by `synthesize`."""
    file = folder / "data.jsonl"
    synthesize(llm, file, config, on_record)
    return file


class _Synthesis:
    """One run: draw → judge → answer, until every kind has its records."""

    def __init__(self, llm: LLM, config: SynthConfig) -> None:
        self.llm, self.config = llm, config
        self.style = Style(None, config.template_args)
        self.system = system_turn(config.system)
        self.turn = user_turn(llm.tokenizer, self.system, self.style, end_tokens(llm.target))
        self.kept, self.kinds = Kept(), Counter[str]()
        self.refused, self.in_a_row = Counter[str](), Counter[str]()
        self.next_draw = 0
        known = llm.tokenizer.added_tokens_decoder
        self.special = {token for token, added in known.items() if added.special}

    def run(self, output: Path, on_record: Callable[[int, int], None]) -> SynthReport:
        total = self.config.count
        with open_to_append(output) as file:
            for (draw, text), _ in read_back(file, "synth", _from_line):
                self._keep(draw, text)
            before = self.kinds.total()
            on_record(total - self.missing.total(), total)
            while self.missing and self.in_a_row.total() < PATIENCE:
                append(file, self._answer(self._judge(self._write(self._draws()))))
                on_record(total - self.missing.total(), total)
        if self.missing:
            raise self._exhausted(output)
        return SynthReport(self.kinds.total() - before, self.kinds, self.refused)

    @property
    def missing(self) -> Counter[str]:
        """Records that each kind still lacks."""
        return Counter(self.config.quotas) - self.kinds

    def _draws(self) -> list[Draw]:
        """The next draws of kinds that lack records, about as many as will do."""
        missing, draws = self.missing, list[Draw]()
        size = min(2 * self.llm.max_batch, 2 * missing.total())
        while len(draws) < size:
            draw = _draw(self.config, self.next_draw)
            self.next_draw += 1
            if missing[draw.kind]:
                draws.append(draw)
        return draws

    def _write(self, draws: list[Draw]) -> list[Draft]:
        """What the user says in every draw."""
        stop = (self.turn.end_text,) if self.turn.end_text else ()
        starts = [
            self.llm.tokenizer(self.turn.start + draw.starter, add_special_tokens=False)[
                "input_ids"
            ]
            for draw in draws
        ]
        how = [replace(self.config.user, seed=draw.seed, stop=stop) for draw in draws]
        done = self.llm.generate(starts, how)
        return [self._draft(*each) for each in zip(draws, starts, done, strict=True)]

    def _draft(self, draw: Draw, start: list[int], done: Completion) -> Draft:
        """The target's tokens up to the end of the user's turn."""
        tokenizer, turn = self.llm.tokenizer, self.turn
        end = next((at for at, token in enumerate(done.token_ids) if token in turn.end_ids), None)
        tokens = done.token_ids[:end]
        # Decoded together: some tokenizers drop the space before the first token of a text.
        before, whole = tokenizer.batch_decode([start, [*start, *tokens]], skip_special_tokens=True)
        said, mark, _ = whole[len(before) :].partition(turn.end_text or "\0")
        if end is None and not mark:
            return Draft(draw, "", [], "unfinished")
        if any(token in self.special for token in tokens):
            return Draft(draw, "", [], "special token")
        text = (draw.starter + said).strip()
        if len(tokens) < SHORTEST:
            return Draft(draw, text, [], "too short")
        prompt = prompt_ids(tokenizer, self._asked(text), self.style)
        too_long = len(prompt) > self.llm.target.max_context // 2
        return Draft(draw, text, prompt, "too long" if too_long else None)

    def _judge(self, drafts: list[Draft]) -> list[Draft]:
        """The drafts to keep, in the order of the draws; the others are counted."""
        good = []
        for draft in drafts:
            if not self.missing[draft.draw.kind]:
                continue
            why = draft.fault or self.kept.refuse(draft.text, self._length(draft.text))
            if why:
                self.refused[why] += 1
                self.in_a_row[why] += 1
            else:
                self._keep(draft.draw, draft.text)
                self.in_a_row.clear()
                good.append(draft)
        return good

    def _keep(self, draw: Draw, text: str) -> None:
        self.kept.add(text, self._length(text))
        self.kinds[draw.kind] += 1
        self.next_draw = max(self.next_draw, draw.number + 1)

    def _length(self, text: str) -> int:
        return len(self.llm.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _answer(self, drafts: list[Draft]) -> list[dict[str, Any]]:
        """Lines of the data file."""
        params = SamplingParams(max_tokens=self.config.max_tokens)
        answers = self.llm.generate([draft.prompt for draft in drafts], params)
        first = self.kinds.total() - len(drafts)
        lines = []
        for number, (draft, answer) in enumerate(zip(drafts, answers, strict=True), start=first):
            said = to_message(self.llm.tokenizer, draft.prompt, answer.token_ids, answer.text)
            origin = {"record": number, "kind": draft.draw.kind, "draw": draft.draw.number}
            talk = {"messages": [*self._asked(draft.text), said], **self.style.in_line()}
            tokens = {"prompt_ids": draft.prompt, "answer_ids": answer.token_ids}
            lines.append({**origin, **talk, **tokens})
        return lines

    def _asked(self, text: str) -> list[Message]:
        return [*self.system, {"role": "user", "content": text}]

    def _exhausted(self, output: Path) -> InputError:
        reasons = ", ".join(f"{count} {why}" for why, count in self.in_a_row.most_common())
        return InputError(
            f"{self.llm.target.name} wrote nothing usable in {self.in_a_row.total()} drafts in a "
            f"row ({reasons}): change the sampling or the mix; {self.kinds.total()} records are "
            f"kept in {output}"
        )


def _draw(config: SynthConfig, index: int) -> Draw:
    """Draw `index` of a seed, whatever came before it."""
    rng = random.Random(f"{config.seed}:{index}")
    kinds = sorted(config.mix)
    [kind] = rng.choices(kinds, [config.mix[kind] for kind in kinds])
    return Draw(index, kind, rng.choice(STARTERS[kind]), rng.getrandbits(63))


def _from_line(line: dict[str, Any]) -> tuple[Draw, str]:
    """What a record of a former run was made from."""
    return Draw(int(line["draw"]), str(line["kind"]), "", 0), str(line["messages"][-2]["content"])
