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
from peagle.errors import InputError, first_line
from peagle.methods.spec import HeadSpec, drafter_config
from peagle.model.drafter import Drafter
from peagle.model.target import Target
from peagle.model.vocab import draft_offsets

SHAPES = Path(__file__).parent / "shapes"
GIVEN_K = 7  # the K at which an acceptance length is given


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
def random_drafter(
    target: Target, method: str, depths: int = GIVEN_K, draft_vocab: int = 32_768
) -> Drafter:
    """A head for a target that drafts up to `depths` tokens, its weights drawn at random; it has as
    many layers as the published ones."""
    spec = HeadSpec(method, depths=depths, draft_vocab=draft_vocab)
    config = drafter_config(target, spec, mask_token_id=len(target.embedding) - 1)
    with torch.device(target.device):
        drafter = Drafter(config).to(target.dtype).eval()
    for parameter in drafter.parameters():
        nn.init.normal_(parameter, std=0.02) if parameter.ndim > 1 else nn.init.ones_(parameter)
    drafter.d2t.copy_(draft_offsets(torch.arange(config.draft_vocab_size)))
    drafter.share_embedding(target.embedding)
    return drafter


def acceptance_rate(acceptance_length: float) -> float:
    """The chance that a draft token is accepted if those before it are, the same for every token,
    of a head with an acceptance length at K = 7. Raises InputError for an impossible one."""
    if not 1 <= acceptance_length < GIVEN_K + 1:
        raise InputError(f"acceptance length {acceptance_length}: must be 1 to below {GIVEN_K + 1}")
    low, high = 0.0, 1.0
    for _ in range(50):
        rate = (low + high) / 2
        if 1 + sum(rate**i for i in range(1, GIVEN_K + 1)) > acceptance_length:
            high = rate
        else:
            low = rate
    return low


class GivenAcceptance(Sampler):
    """Accepts draft tokens at a given rate, whatever the target thinks of them."""

    rate: float  # of acceptance of a draft token if those before it are
    draws: random.Random

    @property
    def plain(self) -> bool:
        """`choose` is always asked."""
        return False

    def choose(self, logits: Tensor, draft: list[int]) -> Choice:
        """The draft up to a place that is drawn, then another token than the draft's."""
        accepted = 0
        while accepted < len(draft) and self.draws.random() < self.rate:
            accepted += 1
        best = greedy(logits)
        best.tokens[:accepted] = draft[:accepted]
        if accepted < len(draft) and best.tokens[accepted] == draft[accepted]:
            best.tokens[accepted] = (draft[accepted] + 1) % logits.shape[1]
        return best


class Synthetic(Native):
    """Answers prompts of random ids, with given acceptance."""

    def __init__(
        self, llm: LLM, params: SamplingParams, prompt_tokens: int, acceptance_rate: float
    ) -> None:
        super().__init__(llm, params)
        self.prompt_tokens = prompt_tokens
        self.acceptance_rate = acceptance_rate
        self._requests = 0

    def ids(self, messages: list[Message]) -> list[int]:
        """A prompt for each text, always the same."""
        draws = torch.Generator().manual_seed(len(messages) + sum(map(ord, messages[0]["content"])))
        most = len(self.llm.target.embedding)
        return torch.randint(most, (self.prompt_tokens,), generator=draws).tolist()

    def prepare(self, request: Request) -> None:
        """Have drafts accepted at the given rate."""
        vocabulary = len(self.llm.target.embedding)
        sampler = GivenAcceptance(request.params, request.tokens, torch.Generator(), vocabulary)
        sampler.rate = self.acceptance_rate
        sampler.draws = random.Random(self._requests)
        request.sampler = sampler
        self._requests += 1
