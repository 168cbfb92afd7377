"""Real shapes without weights: a target and heads of any configuration, drawn at random, and drafts
that are accepted as often as those of a head with a given acceptance length.

What a round costs does not depend on what the weights are, and what it yields is given, so the
throughput is that of a real pair with this acceptance. Of text it says nothing. (Mixtures of
experts: random routers spread tokens evenly over the experts, as trained ones aim to.)
"""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, models
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedTokenizerFast

from peagle.bench.load import Message
from peagle.bench.native import Native
from peagle.engine.llm import LLM
from peagle.engine.params import SamplingParams
from peagle.engine.request import Request
from peagle.engine.sampling import Choice, Sampler, greedy
from peagle.errors import InputError
from peagle.methods.spec import HeadSpec, drafter_config
from peagle.model.drafter import Drafter
from peagle.model.target import Target
from peagle.model.vocab import draft_offsets

SHAPES = Path(__file__).parent / "shapes"
DEEPEST = 7  # draft tokens that an acceptance length is given for
LAYERS: dict[str, int] = {"p-eagle": 4, "eagle3": 1}  # of the published heads


def read_shape(name: str) -> dict[str, object]:
    """A configuration that is shipped (`openai/gpt-oss-20b`), or of a folder or file.

    Raises InputError that lists those shipped.
    """
    known = {file.stem: file for file in sorted(SHAPES.glob("*.json"))}
    path = Path(name).expanduser()
    path = path / "config.json" if path.is_dir() else path
    file = path if path.is_file() else known.get(name.rsplit("/", 1)[-1].lower())
    if file is None:
        why = f"no folder with a config.json, and the shapes shipped are {', '.join(known)}"
        raise InputError(f"target {name}: {why}")
    try:
        record = json.loads(file.read_text())
        record = record.get("text_config", record)
        if record["model_type"] not in CONFIG_MAPPING:
            raise InputError(f"target {name}: model_type {record['model_type']!r} is not known")
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise InputError(f"target {name}: {file} is no configuration ({error!r})") from error
    return record


def random_target(name: str, device: str = "cpu", dtype: torch.dtype = torch.bfloat16) -> Target:
    """A target of a shape, its weights drawn at random on the device."""
    shape = read_shape(name)
    config = CONFIG_MAPPING[shape["model_type"]](**shape)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    # Ids without words: every prompt is given in ids, and nobody reads the answers.
    words = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    return Target(model, PreTrainedTokenizerFast(tokenizer_object=words), name)


@torch.no_grad()
def random_drafter(target: Target, method: str, draft_vocab: int = 32_768) -> Drafter:
    """A head for a target, its weights drawn at random; as many layers as the published ones."""
    spec = HeadSpec(method, LAYERS[method], DEEPEST, draft_vocab)
    vocabulary = target.embedding.shape[0]
    config = drafter_config(target, spec, vocabulary - 1 if method == "p-eagle" else None)
    with torch.device(target.device):
        drafter = Drafter(config).to(target.dtype).eval()
    for parameter in drafter.parameters():
        nn.init.normal_(parameter, std=0.02) if parameter.ndim > 1 else nn.init.ones_(parameter)
    drafter.d2t.copy_(draft_offsets(torch.arange(config.draft_vocab_size)))
    drafter.share_embedding(target.embedding)
    return drafter


def profile(acceptance_length: float) -> list[float]:
    """Acceptance by position (unconditional) of a head with an acceptance length at K = 7 whose
    every token stands with the same chance when those before it do."""
    if not 1 <= acceptance_length < DEEPEST + 1:
        raise InputError(f"acceptance length {acceptance_length}: must be 1 to below {DEEPEST + 1}")
    low, high = 0.0, 1.0
    for _ in range(50):
        chance = (low + high) / 2
        enough = sum(chance**i for i in range(1, DEEPEST + 1)) > acceptance_length - 1
        low, high = (low, chance) if enough else (chance, high)
    return [low**i for i in range(1, DEEPEST + 1)]


class GivenAcceptance(Sampler):
    """Keeps as much of a draft as a profile says, whatever the target thinks of it."""

    @property
    def plain(self) -> bool:
        """`choose` is always asked."""
        return False

    def follow(self, accepted: list[float], seed: int) -> None:
        """`accepted[i]`: share of rounds whose draft token i is accepted."""
        self._accepted, self._draws = accepted, torch.Generator().manual_seed(seed)

    def choose(self, logits: Tensor, draft: list[int]) -> Choice:
        """The draft up to a place that is drawn, then another token than the draft's."""
        drawn = float(torch.rand((), generator=self._draws))
        kept = sum(drawn < share for share in self._accepted[: len(draft)])
        best = greedy(logits)
        for place, token in enumerate(draft):
            if place < kept:
                best.tokens[place] = token
            elif best.tokens[place] == token:
                best.tokens[place] = (token + 1) % logits.shape[1]
        return best


class Synthetic(Native):
    """Answers prompts of random ids, with given acceptance."""

    def __init__(
        self, llm: LLM, params: SamplingParams, prompt_tokens: int, accepted: list[float]
    ) -> None:
        super().__init__(llm, params)
        self.prompt_tokens, self.accepted, self._asked = prompt_tokens, accepted, 0

    def ids(self, messages: list[Message]) -> list[int]:
        """A prompt for each text, always the same."""
        draws = torch.Generator().manual_seed(len(messages) + sum(map(ord, messages[0]["content"])))
        most = len(self.llm.target.embedding)
        return torch.randint(most, (self.prompt_tokens,), generator=draws).tolist()

    def prepare(self, request: Request) -> None:
        """Have the request judged by the profile."""
        ids, params, vocabulary = request.tokens, request.params, len(self.llm.target.embedding)
        sampler = GivenAcceptance(params, ids, torch.Generator(), vocabulary)
        sampler.follow(self.accepted, self._asked)
        request.sampler, self._asked = sampler, self._asked + 1
