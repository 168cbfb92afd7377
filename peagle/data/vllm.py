"""vLLM in this process as what answers prompts."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from peagle.config import InputError, first_line
from peagle.data.regenerate import Engine
from peagle.engine.params import SamplingParams
from peagle.engine.request import Completion, Stats
from peagle.model.source import locate


def vllm_engine(target: str, tokenizer: PreTrainedTokenizerBase, group: int = 1024) -> Engine:
    """The target in vLLM; `group` records are handed over together.

    Raises InputError where vLLM cannot be imported.
    """
    try:
        import vllm  # noqa: PLC0415 (large, and rarely there)
    except ImportError as error:
        raise InputError(
            f"--engine vllm: it cannot be imported here ({first_line(error)}): "
            "pip install 'peagle[vllm]', or run `vllm serve` elsewhere and name its --url"
        ) from error
    path, revision = locate(target)
    llm = vllm.LLM(path, revision=revision)

    def generate(prompts: list[list[int]], params: SamplingParams) -> Sequence[Completion]:
        how = vllm.SamplingParams(
            temperature=params.temperature,
            top_p=params.top_p,
            seed=params.seed,
            max_tokens=params.max_tokens,
        )
        done = llm.generate([{"prompt_token_ids": ids} for ids in prompts], how, use_tqdm=False)
        answers = [request.outputs[0] for request in done]
        return [
            Completion(a.text, list(a.token_ids), a.finish_reason, Stats(), []) for a in answers
        ]

    return Engine(tokenizer, llm.llm_engine.model_config.max_model_len, group, generate)
