"""Data from nothing: the target writes the user's turns itself, then answers them.

The target continues the start of a user turn of its own chat template, perhaps with a few words
that set the kind, and samples until it ends that turn. Draw i depends on the seed and i only, and
its fate on the records before it: a stopped run continues as if it had not been stopped.
"""

import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import count, islice
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from transformers import PreTrainedTokenizerBase

from peagle.data.chat import Conversation, Message, Style, check_text, prompt_ids, with_system
from peagle.data.endpoint import PendingRecord
from peagle.data.records import append, open_to_append, read_back
from peagle.data.regenerate import answer_turn
from peagle.engine.llm import LLM
from peagle.engine.params import RequestFailure, SamplingParams
from peagle.errors import InputError, check_at_least
from peagle.model.template import apply_template

SENTINEL = "peagleuserturn"
MIN_TOKENS = 4  # that the target adds to a starter
MAX_REFUSED = 200  # drafts in a row
MAX_REPEATS = 4  # of the same four words; the writer is stuck in a loop
MIX: Mapping[str, float] = {"chat": 0.5, "code": 0.25, "math": 0.25}
USER = SamplingParams(temperature=0.9, top_p=0.95)  # how user turns are sampled
STARTERS_FILE = Path(__file__).with_name("starters.yaml")
STARTERS: Mapping[str, list[str]] = yaml.safe_load(STARTERS_FILE.read_text())
OnRecord = Callable[[int, int], None]  # called with the number of records so far, and of all


@dataclass(frozen=True, slots=True)
class SynthConfig:
    """Settings of synthesis.

    count: Number of records that the file is to hold.
    max_tokens: Maximum number of tokens of an answer, which is greedy.
    seed: Seed of the random number generator.
    system: System prompt of every conversation. Default: none.
    """

    count: int = 1000
    max_tokens: int = 512
    seed: int = 0
    system: str | None = None
    template_args: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_at_least(1, count=self.count, max_tokens=self.max_tokens)


class SynthReport(NamedTuple):
    """Counts of a run and of its file."""

    written: int  # by this run
    kinds: Counter[str]  # records in the file
    refused: Counter[str]  # drafts that were not used, by reason


class UserTurn(NamedTuple):
    """The text before a user's words in the template, and the end of the turn after them."""

    start: str
    end_ids: frozenset[int]
    end_text: str | None  # set if the template's own mark is not a special token


@dataclass(slots=True)
class UserPrompt:
    """A draft of a user's turn: drawn first, then written by the target."""

    number: int  # counts draws
    kind: str
    starter: str = ""
    seed: int = 0
    text: str = ""  # the user's words


def user_turn(
    tokenizer: PreTrainedTokenizerBase, system: list[Message], style: Style, ends: set[int]
) -> UserTurn:
    """Cut the template where the user speaks; `ends` are the target's own end tokens.

    Raises InputError when the template does not show the user's words once, and something after, or
    by `check_text`.
    """
    check_text([system, style])
    asked = [*system, {"role": "user", "content": SENTINEL}]
    text = apply_template(tokenizer, asked, answer=True, tools=style.tools, args=style.args)
    start, *rest = text.split(SENTINEL)
    if len(rest) != 1 or not rest[0].strip():
        why = "cannot be cut where the user speaks"
        fix = "name another one, or use `peagle data regenerate`"
        raise InputError(why, field="chat_template", fix=fix)
    after = rest[0].strip()
    first = tokenizer(after, add_special_tokens=False)["input_ids"][0]
    known = tokenizer.added_tokens_decoder.get(first)
    if known is not None and known.special:
        return UserTurn(start, frozenset(ends | {first}), None)
    return UserTurn(start, frozenset(ends), after.split()[0])


def synthesize(
    llm: LLM, output: Path, config: SynthConfig, on_record: OnRecord = lambda done, total: None
) -> SynthReport:
    """Have the target write prompts and answer them, until `output` holds `config.count` records,
    each a line with `record`, `kind`, `draw`, `messages`, `prompt_ids`, `answer_ids`.

    Raises InputError when the template cannot be cut, `output` holds anything else, also records of
    other settings, or is being written by another process, or 200 drafts in a row cannot be used;
    RequestFailure when an answer fails.
    """
    return _Synthesis(llm, config).run(output, on_record)


class _Synthesis:
    """One run: draw → write → answer, until every kind has its records."""

    def __init__(self, llm: LLM, config: SynthConfig) -> None:
        self.llm = llm
        self.config = config
        self.style = Style(None, config.template_args)
        self.system = with_system([], config.system)
        self.turn = user_turn(llm.tokenizer, self.system, self.style, llm.target.end_tokens)
        self.texts = set[str]()  # as they are compared
        self.kinds = Counter[str]()
        self.refused = Counter[str]()
        self.in_a_row = 0  # refused since the last record
        known = llm.tokenizer.added_tokens_decoder
        self.special = {token for token, added in known.items() if added.special}

    def run(self, output: Path, on_record: OnRecord) -> SynthReport:
        total = self.config.count
        with open_to_append(output) as file:
            next_draw = 0
            for draft, _ in read_back(file, "synth", self._from_line):
                self._keep(draft)
                next_draw = draft.number + 1
            before = self.kinds.total()
            draws = all_draws(self.config.seed, next_draw)
            on_record(before, total)
            while self.missing:
                size = 2 * min(self.llm.max_batch, self.missing)
                append(file, self._answer(self._write(list(islice(draws, size)))))
                on_record(self.kinds.total(), total)
                if self.in_a_row >= MAX_REFUSED and self.missing:
                    raise self._exhausted(output)
        return SynthReport(self.kinds.total() - before, self.kinds, self.refused)

    @property
    def missing(self) -> int:
        """Records that the file still lacks."""
        return max(0, self.config.count - self.kinds.total())

    def _from_line(self, line: dict[str, Any]) -> UserPrompt:
        """The draft of a line that a former run wrote. Raises InputError for other settings."""
        *system, asked, _ = line["messages"]
        found = UserPrompt(int(line["draw"]), str(line["kind"]), text=str(asked["content"]))
        if (system, line.get("template_args", {})) != (self.system, self.config.template_args):
            raise InputError("holds records with another system prompt or template arguments")
        return found

    def _write(self, drafts: list[UserPrompt]) -> list[UserPrompt]:
        """Have the target write the user's turns. Returns the drafts that are kept, in the order of
        the draws, and counts the rest."""
        stop = (self.turn.end_text,) if self.turn.end_text else ()
        texts = [self.turn.start + draft.starter for draft in drafts]
        starts = self.llm.tokenizer(texts, add_special_tokens=False)["input_ids"]
        params = [replace(USER, seed=draft.seed, stop=stop) for draft in drafts]
        written = self.llm.generate(starts, params)
        selected = []
        for draft, start, completion in zip(drafts, starts, written, strict=True):
            if not self.missing:
                break
            why = self._fill(draft, start, completion.token_ids) or refusal(draft.text, self.texts)
            if why:
                self.refused[why] += 1
                self.in_a_row += 1
            else:
                self._keep(draft)
                self.in_a_row = 0
                selected.append(draft)
        return selected

    def _fill(self, draft: UserPrompt, start: list[int], written: list[int]) -> str | None:
        """Set a draft's text. Returns the reason if it cannot be used."""
        tokenizer = self.llm.tokenizer
        end = next((at for at, token in enumerate(written) if token in self.turn.end_ids), None)
        tokens = written[:end]
        # Decoded together: some tokenizers drop the space before the first token of a text.
        before, whole = tokenizer.batch_decode([start, [*start, *tokens]], skip_special_tokens=True)
        text, mark, _ = whole[len(before) :].partition(self.turn.end_text or "\0")
        if end is None and not mark:
            return "unfinished"
        if self.special.intersection(tokens):
            return "special token"
        if len(tokens) < MIN_TOKENS:
            return "too short"
        draft.text = (draft.starter + text).strip()
        prompt = prompt_ids(tokenizer, self._asked(draft.text), self.style)
        if len(prompt) > self.llm.context // 2:
            return "too long"
        return None

    def _keep(self, draft: UserPrompt) -> None:
        self.texts.add(" ".join(_words(draft.text)))
        self.kinds[draft.kind] += 1

    def _answer(self, drafts: list[UserPrompt]) -> list[dict[str, Any]]:
        """Lines of the data file."""
        first = self.kinds.total() - len(drafts)
        asked = [Conversation([self._asked(draft.text)], self.style) for draft in drafts]
        records = [PendingRecord(number, each) for number, each in enumerate(asked, start=first)]
        answer_turn(self.llm, records, SamplingParams(max_tokens=self.config.max_tokens))
        if failed := [record.problem for record in records if record.problem]:
            raise RequestFailure(failed[0])
        # Each record has one turn, so one line.
        both = zip(drafts, records, strict=True)
        return [{**r.lines[0], "kind": draft.kind, "draw": draft.number} for draft, r in both]

    def _asked(self, text: str) -> list[Message]:
        return [*self.system, {"role": "user", "content": text}]

    def _exhausted(self, output: Path) -> InputError:
        reasons = ", ".join(f"{count} {why}" for why, count in self.refused.most_common())
        kept = f"{self.kinds.total()} records are kept in {output}"
        why = f"wrote nothing usable in {self.in_a_row} drafts in a row ({reasons}); {kept}"
        fix = "use `peagle data regenerate`"
        return InputError(why, field="target", value=self.llm.target.name, fix=fix)


def refusal(text: str, known: set[str]) -> str | None:
    """Return the reason, in a word, if a text is not used; `known` ones as they are compared."""
    words = _words(text)
    fours = Counter(zip(*(words[i:] for i in range(4)), strict=False))
    if not words:
        return "empty"
    if max(fours.values(), default=0) >= MAX_REPEATS:
        return "repetitive"
    return "duplicate" if " ".join(words) in known else None


def all_draws(seed: int, first: int) -> Iterator[UserPrompt]:
    """All draws of a seed from one on, each independent of the others."""
    kinds, shares = zip(*sorted(MIX.items()), strict=True)
    for number in count(first):
        rng = random.Random(f"{seed}:{number}")
        [kind] = rng.choices(kinds, shares)
        yield UserPrompt(number, kind, rng.choice(STARTERS[kind]), rng.getrandbits(63))


def _words(text: str) -> list[str]:
    """Words without case and punctuation, by which texts are compared."""
    return re.findall(r"\w+", text.casefold())
