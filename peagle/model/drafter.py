"""The head. P-EAGLE and EAGLE-3 are one module: they differ in what is fed to `forward`.

Shapes: T slots, D hidden, F feature layers, E target hidden, V draft vocabulary.

| slot (m verified tokens were run)  | token        | feature       | position | predicts  |
|------------------------------------|--------------|---------------|----------|-----------|
| i ≤ m−2                            | x[i+1]       | h[i]          | i        | (context) |
| m−1, next-token prediction (NTP)   | x[m]         | h[m−1]        | m−1      | x[m+1]    |
| m−1+j, multi-token prediction (MTP)| mask token   | `mask_hidden` | m−1+j    | x[m+1+j]  |

EAGLE-3 fills slot m−1+j with its own draft token and the hidden state of slot m−2+j instead.

P-EAGLE drafts all slots in one pass. So the second slot knows the candidates of the first, but not
the one that was taken: after "a" it may offer what only follows "b". A correction adds to the
logits U of the C likeliest tokens of a slot a term that depends on the token a before it:

    F(b | a) = U(b) + W[b] · (SiLU(H n) ⊙ T E(a))

n is the normed hidden state of the slot, E the head's embedding. The other tokens keep their
probability, so the C candidates keep theirs in all. (DSpark's Markov head and Domino are relatives;
neither reads the hidden state.) Its shapes: R slots, P tokens that may come before one, C
candidates, r rank.
"""

from functools import partial
from operator import call
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from peagle.model.attention import Attend, HeadShape
from peagle.model.config import CorrectionConfig, DrafterConfig
from peagle.model.layers import DrafterOutput, FirstLayer, Layer, Rotation


class Candidates(NamedTuple):
    """The likeliest tokens of R slots, likeliest first; both (R, C)."""

    ids: Tensor  # of the draft vocabulary
    logits: Tensor  # float32 at least


class Correction(nn.Module):
    """The correction, see above. It adds nothing before it is trained."""

    def __init__(self, config: CorrectionConfig, hidden: int, vocabulary: int) -> None:
        super().__init__()
        self.candidates = min(config.candidates, vocabulary)
        self.state = nn.Linear(hidden, config.rank, bias=False)
        self.before = nn.Linear(hidden, config.rank, bias=False)
        zeros = self.state.weight.new_zeros(vocabulary, config.rank)
        self.token = nn.Embedding.from_pretrained(zeros, freeze=False)

    def likeliest(self, logits: Tensor) -> Candidates:
        """The candidates of slots, by the head's logits (R, V)."""
        best, ids = logits.topk(self.candidates)
        return Candidates(ids, best.to(torch.promote_types(best.dtype, torch.float32)))

    def forward(self, normed: Tensor, candidates: Candidates, projected: Tensor) -> Tensor:
        """Corrected logits (R, P, C) of the candidates of slots (R, D) after each of P tokens, but
        for a constant of each slot and token. `projected` (R, P, r): T E of these
        tokens."""
        after = F.silu(self.state(normed))[:, None] * projected
        return candidates.logits[:, None] + after @ self.token(candidates.ids).mT

    def apply_to(self, logits: Tensor, normed: Tensor, before: Tensor) -> Tensor:
        """Corrected logits (R, V) of slots with the head's `logits` (R, V) and states (R, D), each
        after the token with embedding `before` (R, D)."""
        candidates = self.likeliest(logits)
        scores = self(normed, candidates, self.before(before)[:, None])[:, 0]
        mass = candidates.logits.logsumexp(-1, keepdim=True)
        corrected = scores.log_softmax(-1) + mass
        return logits.scatter(-1, candidates.ids, corrected.to(logits.dtype))


class Drafter(nn.Module):
    """A drafting head. Its parameters are named as in the checkpoints."""

    d2t: Tensor
    shared_embedding: Tensor | None

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        sizes = config.transformer
        norm = partial(nn.RMSNorm, eps=sizes.rms_norm_eps)
        self.input_norm = norm(config.feature_width) if config.norm_before_fc else None
        norms = [norm(config.target_hidden_size) for _ in config.feature_layers]
        self.fc_norm = nn.ModuleList(norms) if config.fc_norm else None
        self.fc = nn.Linear(config.feature_width, sizes.hidden_size, bias=False)
        others = [Layer(sizes) for _ in range(sizes.num_hidden_layers - 1)]
        self.layers = nn.ModuleList([FirstLayer(sizes, config.norm_before_residual), *others])
        self.norm = norm(sizes.hidden_size)
        hidden = sizes.hidden_size
        rows = config.draft_vocab_size  # of the output head
        self.lm_head = nn.Linear(hidden, rows, bias=False)
        self.correction = Correction(config.correction, hidden, rows) if config.correction else None
        self.rotary = sizes.rotary()
        self.register_buffer("d2t", torch.zeros(rows, dtype=torch.int64))
        self.register_buffer("shared_embedding", None, persistent=False)
        if config.mask_token_id is not None:
            self.mask_hidden = nn.Parameter(torch.zeros(config.feature_width))
        if config.embedding == "full":
            # Drawing values on the meta device would import torch's compiler (1.5 s).
            zeros = torch.zeros(sizes.vocab_size, sizes.hidden_size)
            self.embed_tokens = nn.Embedding.from_pretrained(zeros, freeze=False)
        elif config.embedding == "mask-row":
            self.mask_embedding = nn.Parameter(torch.zeros(sizes.hidden_size))

    def share_embedding(self, table: Tensor) -> None:
        """Read embeddings from the target's table (V_target, D), neither trained nor stored. A head
        with a table of its own does not need it, and may be of another width."""
        if self.config.embedding != "full":
            assert table.shape[1] == self.config.transformer.hidden_size
            self.shared_embedding = table.detach()

    def embed(self, ids: Tensor) -> Tensor:  # (T,) → (T, D)
        if self.config.embedding == "full":
            return self.embed_tokens(ids)
        assert self.shared_embedding is not None, "call share_embedding(target table) first"
        rows = F.embedding(ids, self.shared_embedding).to(self.norm.weight.dtype)
        if self.config.embedding == "mask-row":
            is_mask = ids.eq(cast(int, self.config.mask_token_id))
            return torch.where(is_mask[:, None], self.mask_embedding, rows)
        return rows

    def project(self, features: Tensor) -> Tensor:
        """Target features (T, F·E) → (T, D), through `fc` and the norms before it."""
        if self.input_norm is not None:
            features = self.input_norm(features)
        if self.fc_norm is not None:
            chunks = features.chunk(len(self.fc_norm), dim=-1)
            features = torch.cat(list(map(call, self.fc_norm, chunks)), dim=-1)
        return self.fc(features)

    def placeholders(self, count: int) -> Tensor:
        """Features (count, D) of MTP slots: the projected `mask_hidden`, whatever the depth."""
        return self.project(self.mask_hidden[None]).expand(count, -1)

    def forward(
        self,
        ids: Tensor,  # (T,) int64
        features: Tensor,  # (T, D) projected features, placeholders or fed-back hidden states
        positions: Tensor,  # (T,) int64 RoPE positions
        attend: Attend,
    ) -> DrafterOutput:
        assert ids.shape == positions.shape == features.shape[:1], "not one of each for a slot"
        rotate = Rotation.of(*self.rotary(features, positions[None]))
        first, *others = self.layers
        x = cast(FirstLayer, first).fuse(self.embed(ids), features, rotate, attend)
        for index, layer in enumerate(others, start=1):
            x = layer(x, rotate, attend, index)
        normed = self.norm(x)
        recurrent = normed if self.config.norm_output else x
        return DrafterOutput(normed, recurrent)

    def logits(self, normed: Tensor) -> Tensor:
        """(T, D) → (T, V) over the draft vocabulary."""
        logits = self.lm_head(normed)
        return logits if self.config.logit_scale == 1.0 else logits * self.config.logit_scale

    @property
    def kv_shapes(self) -> list[HeadShape]:
        """Shapes of each layer's keys and values."""
        sizes = self.config.transformer
        shape = HeadShape(sizes.num_key_value_heads, sizes.head_dim, sizes.head_dim)
        return [shape] * len(self.layers)

    @property
    def target_ids(self) -> Tensor:
        """(V,) target token id of every draft id."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)
