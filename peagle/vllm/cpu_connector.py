"""vLLM's connector of hidden states, for its CPU backend; imported by vLLM's own processes.

vLLM 0.32 takes the states out of its cache through pinned memory, which a CPU alone has not.
"""

import os
from types import SimpleNamespace

import torch
from safetensors.torch import save_file
from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as base


class CpuConnector(base.ExampleHiddenStatesConnector):
    """The same files, at once."""

    def _submit_async_write(self, pending: base.PendingSave) -> None:
        if not self._is_tp_rank_zero:
            return
        blocks = torch.tensor(pending.block_ids)[:, None] * self._block_size
        slots = (blocks + torch.arange(self._block_size)).flatten()
        states = base.extract_from_kv_cache(self._kv_cache, slots, len(pending.token_ids))
        tensors = {"hidden_states": states.contiguous(), "token_ids": pending.token_ids}
        try:
            save_file(tensors, pending.filename)
        finally:
            os.close(self._lock_fds.pop(pending.req_id))
        # An event that has happened: nothing is copied in the background here.
        self._req_copy_events[pending.req_id] = SimpleNamespace(query=lambda: True)
