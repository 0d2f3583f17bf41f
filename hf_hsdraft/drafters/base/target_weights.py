"""What a drafter borrows of its target."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from transformers.utils import is_accelerate_available

from ...core.tensors import device_of, is_unhooked


@dataclass(frozen=True)
class TargetWeights:
    """What a drafter borrows of its target, so that no checkpoint has to store it.

    Attributes:
        embed: maps token ids `[...]` to the target's input embeddings `[..., D]`.
        head: `[V', D]`, the target's output rows of the draft vocabulary; `None` if the drafter trained its own, or if
            they were left out.
        vocab_ids: `[V']`, int64, the token id of each row.
    """

    embed: Callable[[torch.Tensor], torch.Tensor]
    head: torch.Tensor | None
    vocab_ids: torch.Tensor


def borrow(
    embedding: nn.Embedding,
    output_head: nn.Module | None,
    vocab_ids: torch.Tensor,
    device: torch.device,
    dtype: torch.dtype,
    scaled: bool = True,
) -> TargetWeights:
    """Collects what a drafter uses of a target: its embedding, and the output rows of the draft vocabulary.

    The rows of a whole vocabulary are not copied, unless the drafter is on another device or of another dtype.

    Args:
        embedding: the target's input embedding.
        output_head: the target's output layer; `None` leaves its rows out.
        vocab_ids: `[V']`, int64, the token id of each row.
        device, dtype: of the drafter.
        scaled: whether embeddings are what the target makes of its rows; if not, they are the rows themselves.
    """
    vocab_ids = vocab_ids.to(device)
    head = None
    if output_head is not None:
        head = _output_rows(output_head, embedding, vocab_ids).to(device, dtype)
    table = embedding.weight.detach()  # the target is never trained
    place = table.device
    is_table = isinstance(embedding, nn.Embedding) and embedding.max_norm is None
    if is_table and (not scaled or (type(embedding) is nn.Embedding and is_unhooked(embedding))):

        def look_up(tokens: torch.Tensor) -> torch.Tensor:
            if is_accelerate_available() and place.type == "meta":  # it has offloaded the table
                from accelerate.utils import align_module_device

                with align_module_device(embedding):
                    return F.embedding(tokens.to(embedding.weight.device), embedding.weight.detach())
            return F.embedding(tokens, table)

    else:
        factor = 1.0 if scaled else getattr(embedding, "embed_scale", 1.0)

        def look_up(tokens: torch.Tensor) -> torch.Tensor:
            return embedding(tokens).detach() / factor

    def embed(tokens: torch.Tensor) -> torch.Tensor:
        tokens = tokens if place.type == "meta" else tokens.to(place)  # an offloaded module moves them itself
        return look_up(tokens).to(device, dtype)

    return TargetWeights(embed, head, vocab_ids)


def _output_rows(output_head: nn.Module, embedding: nn.Embedding, vocab_ids: torch.Tensor) -> torch.Tensor:
    """`[V', D]`: rows of a target's output layer, also of an offloaded or a quantised one."""
    weight = getattr(output_head, "weight", None)
    if is_accelerate_available() and isinstance(weight, torch.Tensor) and weight.device.type == "meta":
        from accelerate.utils import align_module_device

        with align_module_device(output_head):
            return _output_rows(output_head, embedding, vocab_ids)
    if isinstance(weight, torch.Tensor) and weight.dim() == 2 and weight.is_floating_point():
        if torch.equal(vocab_ids, torch.arange(len(weight), device=vocab_ids.device)):
            return weight.detach()
        return weight.detach()[vocab_ids.to(weight.device)]
    # Packed weights are of no form known here, but they multiply; that takes time, so the rows are kept.
    kept = _rows_of_packed.get(output_head)
    if kept is None or not torch.equal(kept[0], vocab_ids.cpu()):
        size, dtype, place = embedding.weight.shape[1], embedding.weight.dtype, device_of(embedding)
        inputs = torch.cat([torch.eye(size), torch.zeros(1, size)]).to(place, dtype)
        with torch.inference_mode(False), torch.no_grad():
            columns = output_head(inputs)[:, vocab_ids.to(place)]
        kept = vocab_ids.cpu(), (columns[:-1] - columns[-1:]).T.contiguous()
        _rows_of_packed[output_head] = kept
    return kept[1]


_rows_of_packed: weakref.WeakKeyDictionary[nn.Module, tuple[torch.Tensor, torch.Tensor]] = weakref.WeakKeyDictionary()
