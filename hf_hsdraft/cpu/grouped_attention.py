"""On CPUs, sdpa reads each key once for all the heads that share it, under a tree's mask too.

transformers repeats keys and values for each group wherever several tokens are read under a mask, as the fast kernels
of most accelerators need. On a CPU they do not, and the copies grow with the context. There the kernel takes the
queries of a head in blocks of rows, and reads all keys for each block. So heads that share keys become rows of one head
where that makes fewer blocks of many keys, for a single token, and in batches. Only the rounding of sums changes.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface
from transformers.integrations import sdpa_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .few_queries import attend_few

# Number of keys of a single text from which on the heads of a tree that share keys are read as one
# - History: over 200 keys joining cost 0.8 to 1.4 ms of 9 and 13 nodes; over 800 it took 7.0 instead of 8.1 ms.
MANY_KEYS = 1024

Attend = Callable[..., torch.Tensor | None]  # query, key, value, mask, scaling; `None` where it does not apply
_grouped: ContextVar[Attend | None] = ContextVar("hsdraft_grouped", default=None)

_BLOCK, _FEW = 32, 192  # the kernel's block of query rows, used for fewer rows than this

# Arguments that do not change what sdpa computes under a full mask. Layers that pass others are left to
# transformers: a later version may use them.
_WITHOUT_EFFECT = frozenset(
    (
        "cache_position",
        "cu_seq_lens_k",
        "cu_seq_lens_q",
        "is_causal",
        "max_length_k",
        "max_length_q",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "return_dict",
        "seq_idx",
        "sliding_window",
        "use_cache",
    )
)
_KNOWN = _WITHOUT_EFFECT | {"scaling"}
_SDPA = torch._C._nn.scaled_dot_product_attention  # torch's own: other libraries replace the name in `functional`
_OFF = ("dropout", "output_attentions")  # handled only if off


@contextlib.contextmanager
def grouped_attention(device: torch.device) -> Iterator[None]:
    """Within, in this thread, layers on a CPU do not repeat keys and values; compiled layers still do.

    transformers' sdpa is wrapped at the first forward of a target on a CPU.
    """
    with attention_by(_attend_tree) if device.type == "cpu" else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def attention_by(function: Attend) -> Iterator[None]:
    """Within, in this thread, layers on a CPU attend by `function` where they would by transformers' sdpa."""
    _install()
    token = _grouped.set(function)
    try:
        yield
    finally:
        _grouped.reset(token)


def _install() -> None:
    """Wraps transformers' sdpa; without effect outside of `grouped_attention`. Idempotent.

    An sdpa that other code registered is left alone.
    """
    original = innermost = ALL_ATTENTION_FUNCTIONS["sdpa"]
    while hasattr(innermost, "__wrapped__"):  # copies of this module wrap each other
        if getattr(innermost, "_hsdraft", None) is _grouped:
            return
        innermost = innermost.__wrapped__
    if innermost is not sdpa_attention.sdpa_attention_forward:
        return

    @functools.wraps(original)
    def sdpa_attention_forward(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        # First, as a context variable would break a compiled graph in each layer.
        ours = None if torch.compiler.is_compiling() or F.scaled_dot_product_attention is not _SDPA else _grouped.get()
        if ours and query.device.type == "cpu" and not args and all(map(is_known, kwargs, kwargs.values())):
            mixed = ours(query, key, value, attention_mask, kwargs.get("scaling"))
            if mixed is not None:
                return mixed, None
        return original(module, query, key, value, attention_mask, *args, **kwargs)

    sdpa_attention_forward._hsdraft = _grouped  # type: ignore[attr-defined]
    AttentionInterface.register("sdpa", sdpa_attention_forward)


def is_in_place() -> bool:
    """Whether layers with sdpa attend by this module within `attention_by`, and no other library replaced that."""
    registered = getattr(ALL_ATTENTION_FUNCTIONS["sdpa"], "_hsdraft", None) is _grouped
    return registered and F.scaled_dot_product_attention is _SDPA


def is_known(name: str, value: Any) -> bool:
    """Whether `attend` may ignore a keyword, or handles it."""
    return value is None or name in _KNOWN or (name in _OFF and not value)


def _attend_tree(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scaling: float | None
) -> torch.Tensor | None:
    """As `attend`, where the shapes fit a draft's forward: each row its own text, under a full mask."""
    batch, heads, n, _ = query.shape
    full = n == 1 if mask is None else mask.dim() == 4 and mask.shape[1] in (1, heads) and mask.shape[2] == n
    return attend(query, key, value, mask, scaling) if full and key.shape[0] == batch else None


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scaling: float | None
) -> torch.Tensor:
    """Attention of `n` tokens `[B, heads, n, size]` over keys and values `[B, key heads, length, size]`.

    `mask` is `[B or 1, heads or 1, n, length]`, bool or additive; `None` where a single token sees all. Returns
    `[B, n, heads, value size]`, as transformers expects.
    """
    batch, heads, n, size = query.shape
    groups = heads // key.shape[1]
    if (found := attend_few(query, key, value, mask, scaling)) is not None:
        return found
    of_all_heads = mask is None or mask.shape[1] == 1
    if of_all_heads and joins_heads(batch, heads, key.shape[1], n, key.shape[2]):
        query = query.reshape(batch, -1, groups * n, size)
        mask = mask if mask is None or n == 1 else mask.repeat(1, 1, groups, 1)  # of one query it is broadcast
    shared = query.shape[1] != key.shape[1]
    mixed = _SDPA(query, key, value, mask, scale=scaling, enable_gqa=shared)
    return mixed.reshape(batch, heads, n, value.shape[-1]).transpose(1, 2).contiguous()


def joins_heads(batch: int, heads: int, key_heads: int, n: int, length: int) -> bool:
    """Whether torch's kernel is quicker where the heads that share keys are rows of one."""
    worth_it = n == 1 or batch > 1 or length >= MANY_KEYS
    return heads > key_heads and worth_it and _are_fewer_together(batch * key_heads, heads // key_heads, n)


def _are_fewer_together(key_heads: int, groups: int, n: int) -> bool:
    """Whether joining the `groups` that share a key head gives a thread fewer blocks of queries."""
    threads = torch.get_num_threads()
    together, apart = key_heads * -(-groups * n // _BLOCK), key_heads * groups * -(-n // _BLOCK)
    return groups * n < _FEW and -(-together // threads) < -(-apart // threads)
