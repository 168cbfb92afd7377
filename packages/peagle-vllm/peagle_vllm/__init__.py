"""A plugin of vLLM: P-EAGLE heads draft with their correction.

vLLM calls `register` once in each of its processes. Nothing of vLLM is changed: its registry gets
another class for the names of EAGLE-3 drafters, and that class (`model.py`) is vLLM's own for a
head without `correction/`.
"""

import logging

TESTED = ("0.32",)  # releases of vLLM that the tests have run with
DRAFTERS = {  # architectures that heads of peagle have, as vLLM reads either dialect
    "LlamaForCausalLMEagle3": "CorrectedLlama",
    "PeagleLlamaForCausalLM": "CorrectedLlama",
    "Eagle3Qwen3ForCausalLM": "CorrectedQwen3",
    "PeagleQwen3ForCausalLM": "CorrectedQwen3",
}
log = logging.getLogger("vllm.peagle")  # below vLLM's own: others are not shown


def register() -> None:
    """Register the drafters, or log why heads draft without their correction."""
    try:
        from vllm import ModelRegistry, __version__  # noqa: PLC0415 (vLLM imports this module)
    except ImportError as error:
        log.warning("peagle: no correction, this vLLM takes no models of plugins (%s)", error)
        return
    if ".".join(__version__.split(".")[:2]) not in TESTED:
        tested = ", ".join(TESTED)
        log.warning("peagle: no correction, tested with vLLM %s and not %s", tested, __version__)
        return
    for name, drafter in DRAFTERS.items():
        ModelRegistry.register_model(name, f"peagle_vllm.model:{drafter}")
