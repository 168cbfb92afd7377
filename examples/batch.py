"""Answer many prompts together, some with settings of their own, with a head and without it.

python examples/batch.py
"""

import time

from peagle import LLM, SamplingParams

PROMPTS = ["def add(a, b):", "def is_even(number):", "The capital of France is", "Copper is"]

# In the deterministic mode an answer does not depend on the requests beside it.
with_head = LLM("smollm2-135m", head="heads/smollm2-135m-p-eagle", deterministic=True)
alone = with_head.use(None, lookup=False)  # the same target in memory, without drafting

params = [SamplingParams(max_tokens=48) for _ in PROMPTS]
params[2] = SamplingParams(max_tokens=8, stop=(".",))

found = {}
for name, llm in {"with the head": with_head, "alone": alone}.items():
    llm.warm_up()  # the first use of a model measures what forwards cost
    began = time.perf_counter()
    answers = llm.generate(PROMPTS, params)  # in the order of the prompts
    seconds = time.perf_counter() - began
    found[name] = [answer.token_ids for answer in answers]
    print(f"{name}: {sum(map(len, found[name]))} tokens in {seconds:.1f} s")

assert found["with the head"] == found["alone"]
print("the same tokens, with drafts and without")
