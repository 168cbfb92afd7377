"""Real shapes without weights: a target and heads of any configuration, drawn at random, and drafts
that are accepted as often as those of a head with a given acceptance length.

What a round costs does not depend on the values of the weights, and what it yields is given, so the
throughput is that of a real pair with this acceptance. Texts mean nothing. (Mixtures of experts:
random routers spread tokens evenly over the experts, as trained ones aim to.)
"""

import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, models
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedTokenizerFast,
)

from peagle.bench.load import Message
from peagle.bench.native import Native
from peagle.engine.llm import LLM
from peagle.engine.params import SamplingParams
from peagle.engine.request import Request
from peagle.engine.sampling import Choice, Sampler, greedy
from peagle.engine.tree import Draft
from peagle.errors import InputError, first_line
from peagle.methods.registry import METHODS
from peagle.methods.spec import HeadSpec, drafter_config
from peagle.model.drafter import Drafter
from peagle.model.target import Target
from peagle.model.vocab import draft_offsets

SHAPES = Path(__file__).parent / "shapes"
GIVEN_K = 7  # the K at which an acceptance length is given
MAX_K = 32  # that heads and profiles are made for


def read_shape(name: str) -> PretrainedConfig:
    """The text model's configuration of a shipped shape (`openai/gpt-oss-20b`), or of a folder or
    file. Raises InputError for others, which lists those shipped."""
    shipped = {file.stem: file for file in sorted(SHAPES.glob("*.json"))}
    path = Path(name).expanduser()
    places = (path / "config.json", path, shipped.get(path.name.lower(), path))
    file = next((place for place in places if place.is_file()), None)
    if file is None:
        why = f"no folder with a config.json, and the shapes shipped are {', '.join(shipped)}"
        raise InputError(f"target {name}: {why}")
    try:
        return AutoConfig.from_pretrained(file).get_text_config()
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        why = f"{file} is no configuration that transformers knows"
        raise InputError(f"target {name}: {why} ({first_line(error)})") from error


def random_target(name: str, device: str = "cpu", dtype: torch.dtype = torch.bfloat16) -> Target:
    """A target of a shape, its weights drawn at random on the device."""
    config = read_shape(name)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    # Ids without words: every prompt is given in ids, and nobody reads the answers.
    words = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    return Target(model, PreTrainedTokenizerFast(tokenizer_object=words), name)


@torch.no_grad()
def random_drafter(target: Target, method: str, draft_vocab: int = 32_768) -> Drafter:
    """A head for a target, its weights drawn at random; it has as many layers as the published
    ones."""
    spec = HeadSpec(method, depths=MAX_K, draft_vocab=draft_vocab)
    config = drafter_config(target, spec, mask_token_id=len(target.embedding) - 1)
    with torch.device(target.device):
        drafter = METHODS[method].build(config).to(target.dtype).eval()
    for parameter in drafter.parameters():
        nn.init.normal_(parameter, std=0.02) if parameter.ndim > 1 else nn.init.ones_(parameter)
    drafter.d2t.copy_(draft_offsets(torch.arange(config.draft_vocab_size)))
    drafter.share_embedding(target.embedding)
    return drafter


def profile(acceptance_length: float) -> list[float]:
    """Acceptance by position (unconditional) of a head with an acceptance length at K = 7, whose
    draft tokens are each accepted with the same chance if those before them are.

    Raises InputError for an impossible length.
    """
    if not 1 <= acceptance_length < GIVEN_K + 1:
        raise InputError(f"acceptance length {acceptance_length}: must be 1 to below {GIVEN_K + 1}")
    low, high = 0.0, 1.0
    for _ in range(50):
        chance = (low + high) / 2
        if 1 + sum(chance**i for i in range(1, GIVEN_K + 1)) > acceptance_length:
            high = chance
        else:
            low = chance
    return [low**i for i in range(1, MAX_K + 1)]


class GivenAcceptance(Sampler):
    """Accepts as much of a draft as a profile says, whatever the target thinks of it."""

    accepted: list[float]  # share of rounds whose i-th draft token is accepted
    draws: random.Random

    @property
    def plain(self) -> bool:
        """`choose` is always asked."""
        return False

    def choose(self, logits: Tensor, draft: Draft) -> Choice:
        """The chain up to a place that is drawn, then another token than the chain's."""
        tokens = draft.tokens
        drawn = self.draws.random()
        accepted = sum(drawn < share for share in self.accepted[: len(tokens)])
        best = greedy(logits)
        best.tokens[:accepted] = tokens[:accepted]
        if accepted < len(tokens) and best.tokens[accepted] == tokens[accepted]:
            best.tokens[accepted] = (tokens[accepted] + 1) % logits.shape[1]
        return best


class Synthetic(Native):
    """Answers prompts of random ids, with given acceptance."""

    def __init__(
        self, llm: LLM, params: SamplingParams, prompt_tokens: int, accepted: list[float]
    ) -> None:
        super().__init__(llm, params)
        self.prompt_tokens = prompt_tokens
        self.accepted = accepted
        self._requests = 0

    def ids(self, messages: list[Message]) -> list[int]:
        """A prompt for each text, always the same."""
        draws = torch.Generator().manual_seed(len(messages) + sum(map(ord, messages[0]["content"])))
        most = len(self.llm.target.embedding)
        return torch.randint(most, (self.prompt_tokens,), generator=draws).tolist()

    def prepare(self, request: Request) -> None:
        """Have drafts accepted as the profile says."""
        vocabulary = len(self.llm.target.embedding)
        sampler = GivenAcceptance(request.params, request.tokens, torch.Generator(), vocabulary)
        sampler.accepted = self.accepted
        sampler.draws = random.Random(self._requests)
        request.sampler = sampler
        self._requests += 1
