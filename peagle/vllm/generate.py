"""vLLM in this process as the engine that answers prompts."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from peagle.engine.params import SamplingParams
from peagle.engine.request import Stats
from peagle.engine.run import Completion
from peagle.errors import InputError, first_line
from peagle.model.loader import locate

Answers = Iterable[tuple[int, Completion]]  # with the numbers of their prompts, as they end


class VllmEngine(NamedTuple):
    """A target loaded by vLLM."""

    max_context: int
    generate: Callable[[list[list[int]], SamplingParams], Answers]


def open_vllm(target: str) -> VllmEngine:
    """Load the target into vLLM. Raises InputError where vLLM cannot be imported."""
    try:
        import vllm  # noqa: PLC0415 (large, and rarely there)
    except ImportError as error:
        why = f"it cannot be imported here ({first_line(error)})"
        fix = "pip install 'peagle[vllm]', or run `vllm serve` elsewhere and name its `url`"
        raise InputError(why, field="engine", value="vllm", fix=fix) from error
    path, revision = locate(target)
    llm = vllm.LLM(path, revision=revision)

    def generate(prompts: list[list[int]], params: SamplingParams) -> Answers:
        sampling = vllm.SamplingParams(
            temperature=params.temperature,
            top_p=params.top_p,
            seed=params.seed,
            max_tokens=params.max_tokens,
        )
        requests = [{"prompt_token_ids": ids} for ids in prompts]
        for number, output in enumerate(llm.generate(requests, sampling, use_tqdm=False)):
            answer = output.outputs[0]
            ids = list(answer.token_ids)
            yield number, Completion(answer.text, ids, answer.finish_reason, Stats(), [])

    return VllmEngine(llm.llm_engine.model_config.max_model_len, generate)
