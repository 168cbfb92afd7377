"""Throughput of a large model's shape without its weights, for a given acceptance length.

    python benchmarks/random_weights.py openai/gpt-oss-20b --device cuda [--k 3,5,7]
        [--concurrency 1,8,64] [--acceptance p-eagle=3.94,eagle3=3.03]

Weights of the target and of a head are random. Drafts are accepted at a given acceptance length at
K = 7: each token with the same probability if the tokens before it are accepted. The cost of a
round does not depend on the values of the weights, so the throughput is that of a real pair with
this acceptance. Texts are meaningless. (Random routers spread tokens evenly over the experts of a
mixture, as trained ones should.) Shapes are in benchmarks/shapes/; any folder or file with a
configuration works, too.
"""

import argparse
import random
from pathlib import Path
from typing import Any

import tables
import torch
from common import RESULTS, whole_numbers
from tokenizers import Tokenizer, models
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedTokenizerFast

from peagle.bench import run
from peagle.bench.native import Player, device_name, play
from peagle.bench.summary import Cell, Result
from peagle.cli.common import progress_bar
from peagle.data.chat import Message
from peagle.engine.drafting import Drafting
from peagle.engine.llm import LLM
from peagle.engine.params import SamplingParams
from peagle.engine.request import Request
from peagle.engine.sampling import Choice, Sampler, greedy
from peagle.engine.tree import Draft
from peagle.errors import InputError
from peagle.methods.registry import METHODS
from peagle.model.drafter import Drafter
from peagle.model.loader import resolve_device
from peagle.model.target import Target
from peagle.train.spec import HeadSpec, drafter_config
from peagle.train.warm_start import draft_offsets

SHAPES = Path(__file__).resolve().parent / "shapes"
GIVEN_K = 7  # K of the given acceptance lengths
MAX_K = 32  # of heads and profiles
SPARE_TOKENS = 64  # of KV cache per request, after its prompt and answer


def read_shape(name: str) -> PretrainedConfig:
    """The text model's configuration of a shipped shape (`openai/gpt-oss-20b`), a folder or a
    file."""
    shipped = SHAPES / f"{Path(name).name.lower()}.json"
    path = shipped if shipped.is_file() else Path(name).expanduser()
    if not path.exists():
        raise InputError("no such shape, folder or file", field="shape", value=name)
    return AutoConfig.from_pretrained(path).get_text_config()


def random_target(name: str, device: str = "cpu", dtype: torch.dtype = torch.bfloat16) -> Target:
    """A target of a shape, its weights drawn at random on the device."""
    config = read_shape(name)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    # A tokenizer without words: prompts are ids, and no answer is read.
    words = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    return Target(model, PreTrainedTokenizerFast(tokenizer_object=words), name)


@torch.no_grad()
def random_drafter(target: Target, method: str, draft_vocab: int = 32_768) -> Drafter:
    """A head for a target, its weights drawn at random, with the layers of the published ones."""
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
    """Acceptance by position (unconditional) of a head with an acceptance length at K = 7.

    Raises InputError for an impossible length.
    """
    if not 1 <= acceptance_length < GIVEN_K + 1:
        why = f"must be 1 to below {GIVEN_K + 1}"
        raise InputError(why, field="acceptance length", value=acceptance_length)
    low, high = 0.0, 1.0
    for _ in range(50):
        chance = (low + high) / 2
        if 1 + sum(chance**i for i in range(1, GIVEN_K + 1)) > acceptance_length:
            high = chance
        else:
            low = chance
    return [low**i for i in range(1, MAX_K + 1)]


class GivenAcceptance(Sampler):
    """Accepts draft tokens by a profile, whatever the target's logits are."""

    accepted: list[float]  # share of rounds whose i-th draft token is accepted
    draws: random.Random

    @property
    def plain(self) -> bool:
        """False, so that `choose` is always called."""
        return False

    def choose(self, logits: Tensor, draft: Draft) -> Choice:
        """The chain up to a random length, then a token that differs from the chain's."""
        tokens = draft.tokens
        drawn = self.draws.random()
        accepted = sum(drawn < share for share in self.accepted[: len(tokens)])
        best = greedy(logits)
        best.tokens[:accepted] = tokens[:accepted]
        if accepted < len(tokens) and best.tokens[accepted] == tokens[accepted]:
            best.tokens[accepted] = (tokens[accepted] + 1) % logits.shape[1]
        return best


class Synthetic(Player):
    """Answers prompts of random ids, and accepts drafts by a profile."""

    def __init__(
        self, llm: LLM, params: SamplingParams, prompt_tokens: int, accepted: list[float]
    ) -> None:
        super().__init__(llm, params)
        self.prompt_tokens = prompt_tokens
        self.accepted = accepted
        self._requests = 0

    def request(self, messages: list[Message], params: SamplingParams) -> Request:
        """Random token ids that depend on the text only, and a sampler that accepts as given."""
        draws = torch.Generator().manual_seed(len(messages) + sum(map(ord, messages[0]["content"])))
        vocabulary = len(self.llm.target.embedding)
        ids = torch.randint(vocabulary, (self.prompt_tokens,), generator=draws).tolist()
        [request] = self.llm.make_requests(self.llm.prompt_ids(ids), params)
        sampler = GivenAcceptance(request.params, request.tokens, torch.Generator(), vocabulary)
        sampler.accepted = self.accepted
        sampler.draws = random.Random(self._requests)
        request.sampler = sampler
        self._requests += 1
        return request


def lengths(text: str) -> dict[str, float]:
    """ "p-eagle=3.9,eagle3=3.0" → {"p-eagle": 3.9, "eagle3": 3.0}, for argparse."""
    pairs = [part.split("=") for part in text.split(",")]
    return {method: float(length) for method, length in pairs}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The report in the form of `peagle bench`; it is written after every load."""
    given = args.acceptance
    accepted = {method: profile(length) for method, length in given.items()}
    target = random_target(args.shape, resolve_device(args.device))
    drafters = {method: random_drafter(target, method) for method in given}
    room = args.prompt_tokens + args.max_tokens + SPARE_TOKENS
    llm = LLM(target, kv_tokens=max(args.concurrency) * room)
    params = SamplingParams(max_tokens=args.max_tokens, ignore_eos=True)
    ways = [Drafting(), *(Drafting(method, k) for method in given for k in args.k)]
    cells = [Cell(way, load, 0.0) for load in args.concurrency for way in ways]

    def opened(cell: Cell, seed: int) -> Synthetic:
        method = cell.drafting.method
        used = llm.use(drafters.get(method), **cell.drafting.options, max_batch=cell.concurrency)
        return Synthetic(used, params, args.prompt_tokens, accepted.get(method, []))

    heads = {m: f"random, acceptance length {length} at K = 7" for m, length in given.items()}
    results = [Result(cell, heads.get(cell.drafting.method)) for cell in cells]
    count = max(args.limit, *args.concurrency)  # a load needs as many
    settings = {
        "target": args.shape, "dtype": "bfloat16", "engine": "native",
        "conversations": count, "prompt_tokens": args.prompt_tokens,
        "max_tokens": args.max_tokens, "acceptance": given, "repeats": args.repeats,
    }  # fmt: skip
    about = {**run.environment(device_name(target.device)), "settings": settings}

    def on_load() -> None:
        run.write_json(args.output, run.report(results, about))
        bar.advance(task)

    prompts = [[f"prompt {number}"] for number in range(count)]
    with progress_bar("loads") as bar:
        task = bar.add_task("", total=len(cells) * args.repeats)
        play(results, [(0, prompts)] * args.repeats, opened, on_load)
    return run.report(results, about)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", help="a name in benchmarks/shapes/, a folder or a file")
    parser.add_argument("--k", type=whole_numbers, default=[3, 5, 7], help="draft tokens a round")
    parser.add_argument("--concurrency", type=whole_numbers, default=[1, 8, 64])
    parser.add_argument("--limit", type=int, default=16, help="prompts, at least the highest load")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--max-tokens", type=int, default=256, help="length of every answer")
    parser.add_argument("--acceptance", type=lengths, default="p-eagle=3.94,eagle3=3.03",
                        help="acceptance length of each method at K = 7")  # fmt: skip
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--output", type=Path, default=RESULTS / "bench-gpt-oss-20b.json")
    args = parser.parse_args()
    try:
        report = measure(args)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    print("\n".join(tables.grid(report)))


if __name__ == "__main__":
    main()
