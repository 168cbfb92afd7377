"""Train a head for a model: the model answers prompts, and the head learns from its answers.

python examples/train_a_head.py

This is `peagle data regenerate`, `peagle train` and `peagle generate` in Python. Two prompts and
forty steps only show the way: docs/training.md says how much data a useful head takes.
"""

from pathlib import Path

from peagle import LLM, SamplingParams, load_drafter
from peagle.data.dataset import read_conversations, read_examples
from peagle.data.regenerate import regenerate
from peagle.model.loader import load_target
from peagle.train.config import TrainConfig
from peagle.train.spec import HeadSpec
from peagle.train.trainer import Trainer
from peagle.train.warm_start import new_drafter

folder = Path("runs/example")
folder.mkdir(parents=True, exist_ok=True)
prompts, answers = folder / "prompts.jsonl", folder / "answers.jsonl"
prompts.write_text('{"turns": ["Add two numbers."]}\n{"turns": ["Name a fruit."]}\n')

target = load_target("smollm2-135m")
asked = read_conversations(prompts)
regenerate(LLM(target), asked, answers, SamplingParams(max_tokens=64))

data = read_examples(answers, target.tokenizer, max_length=256)
head = new_drafter(target, [document.ids for document in data], HeadSpec(draft_vocab=100))
config = TrainConfig(folder, steps=40, lr=1e-3)
Trainer(config, target, head, data).run(lambda row: print(row["step"], row["loss"]))

llm = LLM(target, load_drafter(folder / "head", target))
print(llm.generate(["Name a fruit."], SamplingParams(max_tokens=32))[0].text)
