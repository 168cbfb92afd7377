"""Print an answer while it is written: draft tokens in green, the target's own tokens plain.

python examples/stream.py
"""

from peagle import LLM, SamplingParams

GREEN, PLAIN = "\033[32m", "\033[0m"

llm = LLM("smollm2-135m", head="heads/smollm2-135m-p-eagle")

# The seed fixes the answer: it is the same with a head and without one.
params = SamplingParams(temperature=0.8, top_p=0.95, seed=1, max_tokens=64)

run = llm.stream(["Once upon a time, a compiler"], params)
for chunk in run:
    colour = GREEN if chunk.drafted else PLAIN
    print(f"{colour}{chunk.text}{PLAIN}", end="", flush=True)

[answer] = run.completions()
drafted = sum(answer.drafted)
print(f"\n{drafted} of {len(answer.token_ids)} tokens were accepted draft tokens")
