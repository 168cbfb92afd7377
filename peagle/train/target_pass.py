"""The target over a packed sequence: hidden states, features and logits, without gradient.

Shapes: N tokens, R rows, E hidden size, F·E features, V draft vocabulary.
"""

from collections.abc import Callable
from copy import copy
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from peagle.model.attention import AttentionSpec, CausalAttend
from peagle.model.base_target import TargetOutput
from peagle.model.padding import pad_rows
from peagle.train.batches import PackedDocuments

if TYPE_CHECKING:  # a target is an argument, as a backend is
    from peagle.model.target import Target


def run_target(target: "Target", sequence: PackedDocuments, taps: tuple[int, ...]) -> TargetOutput:
    """Hidden states (N, E) for labels and, of the layers `taps`, features (N, F·E) for the drafter,
    without gradient."""
    attend = DocumentsAttend(sequence)
    out = target.forward(pad_rows(sequence.ids), pad_rows(sequence.positions), attend, taps)
    return TargetOutput(*(rows[: len(sequence.ids)] for rows in out))


def run_document(target: "Target", ids: list[int], taps: tuple[int, ...]) -> TargetOutput:
    """`run_target` over one document."""
    tokens = torch.tensor(ids, device=target.device)
    zeros = torch.zeros_like(tokens)
    return run_target(target, PackedDocuments(tokens, zeros.bool(), zeros), taps)


class DocumentsAttend:
    """Attend of the target over packed documents, each causal and alone. Nothing sees the rows that
    fill a document's tiles, which come after it; rows after the last document are not attended."""

    def __init__(self, sequence: PackedDocuments) -> None:
        _, number, counts = sequence.documents.unique_consecutive(
            return_inverse=True, return_counts=True
        )
        self.lengths = counts.tolist()
        # Where each row is in a table of documents, all as long as the longest.
        self.cells = number * max(self.lengths) + sequence.positions

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        if q.is_cuda and spec == AttentionSpec(spec.scale):
            return self.together(q, k, v, spec.scale)
        split = (x[: len(self.cells)].split(self.lengths) for x in (q, k, v))
        outputs = []
        attend = CausalAttend()
        for length, q_part, k_part, v_part in zip(self.lengths, *split, strict=True):
            padded = (pad_rows(part) for part in (q_part, k_part, v_part))
            outputs.append(attend(layer, *padded, spec)[:length])
        return pad_rows(torch.cat(outputs))

    def together(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """All documents in one call, which saves a GPU many small ones."""
        table = len(self.lengths), max(self.lengths)

        def filled(x: Tensor) -> Tensor:  # (T, N, H) → (documents, N, longest, H)
            empty = x.new_zeros(table[0] * table[1], *x.shape[1:])
            rows = empty.index_copy(0, self.cells, x[: len(self.cells)])
            return rows.unflatten(0, table).transpose(1, 2)

        q, k, v = map(filled, (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        return pad_rows(out.transpose(1, 2).flatten(0, 1)[self.cells])


def logits_of(target: "Target", ids: Tensor) -> Callable[[Tensor], Tensor]:
    """A function (R, E) → (R, V): the target's logits of the tokens `ids` (V,) only, by its
    own head with a copy of their rows of the output layer."""
    output = target.model.get_output_embeddings()
    rows = nn.Linear(output.weight.shape[1], len(ids), bias=False, device="meta")
    rows.weight = nn.Parameter(output.weight[ids], requires_grad=False)
    if output.bias is not None:
        rows.bias = nn.Parameter(output.bias[ids], requires_grad=False)
    [name] = [name for name, child in target.model.named_children() if child is output]
    head = copy(target.head)
    head._modules = head._modules | {name: rows}

    @torch.no_grad()
    def logits(hidden: Tensor) -> Tensor:
        found: Tensor = head(inputs_embeds=hidden[None], use_cache=False).logits
        return found[0]

    return logits
