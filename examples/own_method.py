"""A drafting method of your own (docs/adding-a-method.md): P-EAGLE with a table of bigrams."""

from pathlib import Path

import torch

from peagle import LLM, SamplingParams
from peagle.data.example import Example
from peagle.methods.p_eagle import PEagle
from peagle.methods.registry import METHODS
from peagle.model.drafter import Drafter
from peagle.model.loader import load_target
from peagle.train.config import TrainConfig
from peagle.train.spec import HeadSpec
from peagle.train.trainer import Trainer
from peagle.train.warm_start import new_drafter


class BigramDrafter(Drafter):
    def __init__(self, config):
        super().__init__(config)
        self.table = torch.nn.Parameter(torch.zeros(config.transformer.vocab_size, len(self.d2t)))


class Bigram(PEagle):
    name = "bigram"
    conditional = True  # the logits depend on the token before
    build = staticmethod(BigramDrafter)

    def logits(self, drafter, normed, previous_ids):
        return drafter.logits(normed) + drafter.table[previous_ids]


METHODS["bigram"] = Bigram()
target, params = load_target("smollm2-135m"), SamplingParams(max_tokens=48)
answer = LLM(target).generate(["Once upon a time"], params)[0].token_ids
data = [Example(answer, [True] * len(answer))]  # a head learns the target's own answers
head = new_drafter(target, [answer], HeadSpec("bigram", layers=1, draft_vocab=32))
Trainer(TrainConfig(Path("runs/bigram"), epochs=20), target, head, data).run()
print(LLM(target, head.eval()).generate(["Once"], params)[0].stats.tokens_per_forward)
