"""Plays vLLM's part: the files it writes, and the ways in which it ends.

What it computes lies in the model's folder already: it starts in no time. FAKE_VLLM_ENDS names a
number of documents: it kills itself when it was given so many.
"""

import fcntl
import json
import os
import signal
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import load_file, save_file


class SamplingParams:
    def __init__(self, **given: Any) -> None:
        assert given["max_tokens"] == 1


class TokensPrompt(NamedTuple):
    prompt_token_ids: list[int]


class Output(NamedTuple):
    kv_transfer_params: dict[str, str]


class LLM:
    def __init__(self, **given: Any) -> None:
        print("what vLLM prints is no reply")
        if Path(given["model"], "refused").exists():
            raise ValueError("no room for the model")
        transfer = given.pop("kv_transfer_config")
        self.folder = Path(transfer["kv_connector_extra_config"]["shared_storage_path"])
        self.asked = given | {"path": os.environ["PATH"], "windows": []}
        self.note()
        assert transfer["kv_connector"] == "ExampleHiddenStatesConnector"
        speculative = given["speculative_config"]
        assert speculative["method"] == "extract_hidden_states"
        hf_config = speculative["draft_model_config"]["hf_config"]
        self.layers = sorted(set(hf_config["eagle_aux_hidden_state_layer_ids"]))  # as vLLM does
        self.longest, self.count = given["max_model_len"], 0
        self.every = load_file(Path(given["model"], "states", "of_documents.safetensors"))

    def generate(
        self, prompts: list[TokensPrompt], params: SamplingParams, *, use_tqdm: bool
    ) -> list[Output]:
        assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "1", "files would never be written"
        self.asked["windows"].append([len(prompt.prompt_token_ids) for prompt in prompts])
        self.note()
        files = [str(self.states(*prompt)) for prompt in prompts]
        return [Output({"hidden_states_path": file}) for file in files]

    def note(self) -> None:
        """Tell the test what was asked, and the lengths of the documents of each request."""
        (self.folder.parent / "asked.json").write_text(json.dumps(self.asked))

    def states(self, ids: list[int]) -> Path:
        if str(self.count) == os.environ.get("FAKE_VLLM_ENDS"):
            os.kill(os.getpid(), signal.SIGKILL)
        assert len(ids) < self.longest, "vLLM refuses them"
        every = self.every[",".join(map(str, ids))]  # (N, layers + 1, E)
        states = np.ascontiguousarray(every[:, self.layers])
        path = self.folder / f"{self.count}-c0ffee.safetensors"
        with path.with_name(f"{path.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            save_file({"hidden_states": states, "token_ids": np.array(ids)}, path)
        self.count += 1
        return path
