"""/v1/completions says what the engine says."""

from serving import MODEL, Running

from peagle.engine.llm import LLM
from peagle.engine.request import SamplingParams


def test_same_text_and_usage(running: Running, llm: LLM) -> None:
    wanted = llm.generate(["the cat sat"], SamplingParams(max_tokens=24))[0]
    got = running.client().completions.create(
        model=MODEL, prompt="the cat sat", temperature=0, max_tokens=24
    )
    [choice] = got.choices
    assert (choice.text, choice.finish_reason) == (wanted.text, wanted.finish_reason)
    assert got.usage is not None
    ids = llm.prompt_ids("the cat sat")
    assert got.usage.prompt_tokens == len(ids)
