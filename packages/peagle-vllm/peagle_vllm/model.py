"""vLLM's EAGLE-3 drafters, with the correction of a head that has one in `correction/`.

Shapes: B requests, K draft tokens of each, C candidates, D drafter hidden, r rank, V target
vocabulary, V_d draft vocabulary.

A P-EAGLE head drafts all K tokens in one pass. The correction makes a token's logits U depend on
the token a before it, for the C likeliest tokens b; n is the normed hidden state, E the embedding:

    F(b | a) = U(b) + W[b] · (SiLU(H n) ⊙ T E(a))

The other tokens keep their probability, so the C candidates keep theirs in all. vLLM gives
`compute_logits` the states of all K places and not the newest token, so the first place stays as it
is. The output stays the target's own: only drafts change.
"""

import hashlib
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from vllm.logger import init_logger
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM
from vllm.model_executor.models.qwen3_eagle3 import Eagle3Qwen3ForCausalLM
from vllm.transformers_utils.repo_utils import get_hf_file_to_dict

FOLDER = "correction"
PREFIX = f"{FOLDER}."
DIGESTED = ("d2t", "norm.weight", "lm_head.weight")  # the candidates come from these
log = init_logger("vllm.peagle")


class Correction(NamedTuple):
    """Tensors of a correction; the letters are those of the formula."""

    state: Tensor  # H (r, D)
    before: Tensor  # T (r, D)
    token: Tensor  # W (V_d, r)
    candidates: int  # C


class Place(NamedTuple):
    """The candidates of one place of each request."""

    ids: Tensor  # (B, C)
    logits: Tensor  # (B, C)
    rows: slice  # among all places of all requests


class Corrected:
    """The correction, in addition to either of vLLM's drafters."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        speculative = vllm_config.speculative_config
        draft = speculative.draft_model_config
        self.head: str = draft.model
        self.k: int = speculative.num_speculative_tokens
        self.correction: Correction | None = None
        self.about = get_hf_file_to_dict(f"{FOLDER}/config.json", draft.model, draft.revision)
        if self.about is None:
            return
        if not speculative.parallel_drafting:
            self.say_off("parallel_drafting is not set")
        else:
            source = DefaultModelLoader.Source(
                draft.model,
                draft.revision,
                subfolder=FOLDER,
                prefix=PREFIX,
                fall_back_to_pt=False,
                allow_patterns_overrides=["*.safetensors"],
            )
            self.secondary_weights = [source]  # vLLM's loader reads these after the head's

    def say_off(self, why: str) -> None:
        """Log that the head drafts without its correction."""
        log.warning("peagle: %s drafts without its correction: %s", self.head, why)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Any:
        """Load the head, and the correction where it is among the weights."""
        read, digested = dict[str, Tensor](), dict[str, Tensor]()

        def of_the_head() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in weights:
                if name.startswith(PREFIX):
                    read[name.removeprefix(PREFIX)] = tensor
                    continue
                if name in DIGESTED:
                    digested[name] = tensor
                yield name, tensor

        loaded = super().load_weights(of_the_head())
        if read:
            self.correction = self.checked(read, digested)
        elif self.correction is None and hasattr(self, "secondary_weights"):
            self.say_off("its load format reads no second folder")
        return loaded

    def checked(self, read: dict[str, Tensor], digested: dict[str, Tensor]) -> Correction:
        """The correction, where it was trained with this head."""
        found, trained = digest(digested), self.about["head"]
        if found != trained:
            why = f"it was trained with another head (digest {trained}, not {found})"
            raise ValueError(f"{self.head}/{FOLDER}: {why}; export the head again")
        like, rank = self.model.norm.weight, self.about["rank"]
        wide, tokens = (rank, len(like)), (self.config.draft_vocab_size, rank)
        wanted = {"state.weight": wide, "before.weight": wide, "token.weight": tokens}
        shapes = {name: tuple(tensor.shape) for name, tensor in read.items()}
        if shapes != wanted:
            why = f"its tensors are {shapes}, not {wanted}"
            raise ValueError(f"{self.head}/{FOLDER}: {why}; export the head again")
        loaded = [read[name].to(like) for name in wanted]
        return Correction(*loaded, min(self.about["candidates"], len(loaded[2])))

    @cached_property
    def targets(self) -> Tensor | slice:
        """The target's ids of the draft vocabulary (V_d,)."""
        offsets = self.draft_id_to_target_id
        if offsets is None:
            return slice(None)
        return offsets + torch.arange(len(offsets), device=offsets.device)

    @cached_property
    def projected(self) -> Tensor:
        """T E of every token (V, r). vLLM shares the embedding after loading, so not before the
        first use; with tensor parallelism each look-up is an exchange, so once."""
        tokens = torch.arange(self.config.vocab_size, device=self.correction.before.device)
        parts = [self.model.embed_tokens(ids) for ids in tokens.split(4096)]
        return torch.cat([F.linear(part, self.correction.before) for part in parts])

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        """Logits (B·K, V) of states (B·K, D), request by request; of other rows uncorrected."""
        logits = super().compute_logits(hidden_states)
        if logits is None or not self.corrects(logits):
            return logits
        best, drafted = logits[:, self.targets].topk(self.correction.candidates)
        for ids, corrected, places in self.chain(best, drafted, hidden_states):
            logits[places].scatter_(-1, ids, corrected)
        return logits

    def get_top_tokens(self, hidden_states: Tensor) -> Tensor:
        """The likeliest tokens (B·K,) of states (B·K, D), without logits of all tokens: vLLM asks
        for them with `use_local_argmax_reduction`."""
        if not self.corrects(hidden_states):
            return super().get_top_tokens(hidden_states)
        count = self.correction.candidates
        drafted, best = self.logits_processor.get_top_k_tokens(self.lm_head, hidden_states, count)
        chain = self.chain(best, drafted, hidden_states)
        chosen = [first_largest(corrected, ids) for ids, corrected, _ in chain]
        return torch.stack(chosen, dim=-1).flatten()

    def corrects(self, rows: Tensor) -> bool:
        """True for the rows of requests, of a head with a correction."""
        return self.correction is not None and len(rows) % self.k == 0

    def chain(self, best: Tensor, drafted: Tensor, normed: Tensor) -> Iterator[Place]:
        """Correct the largest logits (B·K, C) and their tokens along the chain of the likeliest
        ones, a place at a time."""
        state, _, token, _ = self.correction
        rows = token[drafted]  # (B·K, C, r)
        ids = drafted
        if isinstance(self.targets, Tensor):
            ids = self.targets[drafted]
        states = F.silu(F.linear(normed, state))  # (B·K, r)
        exact = best.float()
        mass = exact.logsumexp(-1, keepdim=True)
        corrected = best[:: self.k]
        yield Place(ids[:: self.k], corrected, slice(0, None, self.k))
        for place in range(1, self.k):
            chosen = first_largest(corrected, ids[place - 1 :: self.k])
            places = slice(place, None, self.k)
            after = states[places] * self.projected[chosen]
            scores = exact[places] + (rows[places] @ after[:, :, None])[:, :, 0]
            corrected = (scores.log_softmax(-1) + mass[places]).to(best.dtype)
            yield Place(ids[places], corrected, places)


def first_largest(logits: Tensor, ids: Tensor) -> Tensor:
    """The token that vLLM chooses among candidates (B, C): of equal ones the lowest. (An argmax
    over all tokens takes milliseconds on a CPU.)"""
    lower = logits < logits.amax(-1, keepdim=True)
    return ids.masked_fill(lower, torch.iinfo(ids.dtype).max).amin(-1)


def digest(tensors: dict[str, Tensor]) -> str:
    """Hash of the tensors that a correction depends on, as peagle writes it."""
    found = hashlib.sha256()
    for name in DIGESTED:
        if name in tensors:
            found.update(tensors[name].cpu().contiguous().view(torch.uint8).numpy().data)
    return found.hexdigest()[:16]


class CorrectedLlama(Corrected, Eagle3LlamaForCausalLM):
    """The drafter with Llama's layers."""


class CorrectedQwen3(Corrected, Eagle3Qwen3ForCausalLM):
    """The drafter with Qwen3's layers."""
