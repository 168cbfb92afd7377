"""Three threads decode at once: `threads.py ATTACK` prints how they fared as a line of JSON."""

import json
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tiny import make_drafter, make_target, random_prompts

from peagle.engine.llm import LLM
from peagle.engine.params import SamplingParams
from peagle.model.target import Target

ROUNDS, THREADS, K = 5, 3, 4
PROMPTS = random_prompts(6, 9, seed=9)
PARAMS = SamplingParams(max_tokens=40, ignore_eos=True)

Answers = list[list[int]]


def make(target: Target) -> LLM:
    """The default mode, or the exact one where rounding could differ with the batch."""
    head = make_drafter(target, "p-eagle").to(target.dtype)
    return LLM(target, head, k=K, deterministic=target.dtype != torch.float32)


def ask(llm: LLM) -> Answers:
    return [done.token_ids for done in llm.generate(PROMPTS, PARAMS)]


def together(calls: list[Callable[[], Answers]], wanted: Answers) -> list[str]:
    """Run calls in a thread each; how each of them ended."""
    ended, begin = list[str](), threading.Barrier(len(calls))

    def run(call: Callable[[], Answers]) -> None:
        begin.wait()
        try:
            ended.append("right" if call() == wanted else "other tokens")
        except BaseException as error:
            ended.append(repr(error)[:200])

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ended


def handed_over(llm: LLM) -> Answers:
    """A stream whose every step is taken in a thread of its own, one after the other."""
    run = llm.stream(PROMPTS, PARAMS)
    while any(request.finish_reason is None for request in run.requests):
        step = threading.Thread(target=run.step)
        step.start()
        step.join()
    return [done.token_ids for done in run.completions()]


def left_early(llm: LLM) -> Answers:
    """A stream whose text is read to its end, after some that are not."""
    for number in range(4):
        for _, _ in zip(range(3 * number + 1), llm.stream(PROMPTS[:3], PARAMS), strict=False):
            pass
    run = llm.stream(PROMPTS, PARAMS)
    received = [""] * len(PROMPTS)
    for chunk in run:
        received[chunk.index] += chunk.text
    assert received == [done.text for done in run.completions()], "a stream lost text"
    return [done.token_ids for done in run.completions()]


def calls_of(attack: str, target: Target) -> list[Callable[[], Answers]]:
    """Work of each thread in one round."""
    if attack == "handed over":
        return [lambda: handed_over(make(target))]
    if attack == "left early":
        llm = make(target)
        return [lambda: left_early(llm)] * THREADS
    if attack == "two LLMs":
        llms = [make(target), LLM(target)]
    elif attack == "used LLMs":
        llm = make(target)
        llms = [llm, llm.use(None), llm.use(llm.drafter, 2)]
    else:
        llms = [make(target)] * THREADS
    if attack != "one new LLM":  # whose engine the threads make
        for llm in llms:
            llm.warm_up()
    return [lambda llm=llm: ask(llm) for llm in llms]


def main() -> None:
    torch.set_num_threads(1)
    sys.setswitchinterval(1e-5)  # seconds: threads meet in as many places as can be
    attack = sys.argv[1]
    target = make_target()
    if "bfloat16" in attack:
        target = Target(target.model.bfloat16(), target.tokenizer, target.name)
    wanted = ask(make(target))
    ended = Counter[str]()
    for _ in range(ROUNDS):
        calls = calls_of(attack, target)
        ended.update(together(calls, wanted))
        after = "right" if calls[0]() == wanted else "wrong"
    wrong = [how for how in ended if how != "right"]
    print(json.dumps({"right": ended["right"], "wrong": wrong, "after": after}))


if __name__ == "__main__":
    main()
