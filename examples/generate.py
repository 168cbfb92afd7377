"""Answer one question with a head that drafts, and show what drafting gained.

python examples/generate.py
"""

from peagle import LLM, SamplingParams

# The target may also be a folder, a hub id or a .gguf file. Without `head`, lookup drafts.
llm = LLM("smollm2-135m", head="heads/smollm2-135m-p-eagle")

# A chat model expects its chat template around a question. A base model continues a plain text.
question = [{"role": "user", "content": "Write a Python function that reverses a list."}]
prompt = llm.tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)

answer = llm.generate([prompt], SamplingParams(max_tokens=96))[0]
print(answer.text)

# 1.0 would be the target alone: it emits one token in each forward.
print(f"{answer.stats.tokens_per_forward:.2f} tokens in a forward of the target")
