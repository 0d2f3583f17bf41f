"""A drafter's weights as decoding multiplies by them: joined, and laid out for the processor once.

At the size of a drafter every operation costs more to start than to run, and on a CPU the weights have left its caches
by the time the target has run. So what can be one product is one here, of few bytes. The network is that of
[`HSDrafter`], but rounded elsewhere: drafts may differ a little from what training computes, the text cannot.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from .modeling_hsdraft import HSDrafter, HSDraftLayer, HSDraftRMSNorm, LowRankInjector, PathInjector, TargetWeights

Transform = Callable[[torch.Tensor], torch.Tensor]  # of the last axis


_FEW_ROWS = 8  # as many as a draft multiplies at once, a beam's nodes at the most


class Product:
    """x W^T + b, by a weight that stays as it is.

    What a few rows cost on a CPU is fetching the weight. So in half precision they are multiplied by 8-bit weights,
    each output's scaled by its greatest: close enough for drafts. Many rows, as of a prompt, take the weight itself.

    Args:
        weight: `[out, in]`; bias: `[out]`.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._weight, self._bias = weight.detach(), None if bias is None else bias.detach()
        self._small = _in_8_bits(self._weight)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._small is None or not 0 < _rows(x) <= _FEW_ROWS:
            return F.linear(x, self._weight, self._bias)
        y = _times_8_bits(x, *self._small)
        return y if self._bias is None else y + self._bias

    def of(self, outputs: torch.Tensor) -> Transform:
        """Some of the outputs, `[n]`, int64, without their bias; for few rows."""
        if self._small is None:
            weight = self._weight.index_select(0, outputs)
            return lambda x: F.linear(x, weight)
        weight, scales = (part.index_select(0, outputs) for part in self._small)
        return lambda x: _times_8_bits(x, weight, scales)


def _rows(x: torch.Tensor) -> int:
    return x.numel() // x.shape[-1]


def _times_8_bits(x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return torch._weight_int8pack_mm(x.reshape(_rows(x), -1).contiguous(), weight, scales).view(*x.shape[:-1], -1)


def _in_8_bits(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """`[out, in]` as integers, and what to multiply each output with `[out]`, where a kernel makes that quicker.

    There is one for bfloat16 and vectors of these widths; it does not check that the inputs fill whole vectors.
    """
    quick = weight.device.type == "cpu" and torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    if not quick or sys.platform == "win32" or weight.dtype != torch.bfloat16 or weight.shape[1] % 64:
        return None
    scales = (weight.abs().amax(dim=1).float() / 127).clamp(min=torch.finfo(torch.bfloat16).tiny)
    return (weight / scales[:, None]).round().to(torch.int8), scales.to(weight.dtype)


class Norm:
    """The root-mean-square norm of a module, without the module."""

    def __init__(self, norm: HSDraftRMSNorm, dtype: torch.dtype) -> None:
        self._shape, self._weight, self._eps = tuple(norm.weight.shape), norm.weight.detach().to(dtype), norm.eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self._shape, self._weight, self._eps)


def is_plain(module: nn.Module) -> bool:
    """Whether a module is its weight and no more: no adapter, nothing that fetches it from elsewhere."""
    return type(module) is nn.Linear and not module._forward_hooks and "forward" not in vars(module)


def joined(*modules: nn.Module) -> Transform:
    """What the modules make of the same input, side by side."""
    if len(modules) > 1 and not all(map(is_plain, modules)):
        return lambda x: torch.cat([module(x) for module in modules], dim=-1)
    if not is_plain(modules[0]):
        return modules[0]
    weights = [module.weight for module in modules]
    biases = [module.bias for module in modules]
    return Product(
        weights[0] if len(weights) == 1 else torch.cat(weights),  # type: ignore[arg-type]
        None if biases[0] is None else torch.cat(biases),  # type: ignore[arg-type]
    )


@dataclass(frozen=True)
class LayerWeights:
    """Those of one trunk layer: q, k and v are one product, gate and up another."""

    input_norm: Norm
    qkv: Transform
    output: Transform
    mlp_norm: Norm
    gate_up: Transform
    down: Transform

    @classmethod
    def of(cls, layer: HSDraftLayer, dtype: torch.dtype) -> LayerWeights:
        attention = layer.attention
        return cls(
            Norm(layer.input_norm, dtype),
            joined(attention.q_proj, attention.k_proj, attention.v_proj),
            joined(attention.o_proj),
            Norm(layer.mlp_norm, dtype),
            joined(layer.gate_proj, layer.up_proj),
            joined(layer.down_proj),
        )


class JoinedPathInjector:
    """A `PathInjector` in fewer products: what it makes of a token, and of a path, is needed twice, and made at once.

    Its state is the path's, beside what the next token's update and this token's code need of it.
    """

    def __init__(self, injector: PathInjector, dtype: torch.dtype) -> None:
        self._size = size = injector.token_proj.weight.shape[0]
        self._norm = Norm(injector.token_norm, dtype)
        token = injector.token_proj.weight.float()
        update, state = injector.update.weight.float(), injector.state_proj.weight.float()
        bias = torch.cat([injector.update.bias.float(), state.new_zeros(len(state))])
        of_token = torch.cat([update[:, :size] @ token, state[:, :size] @ token])
        of_path = torch.cat([torch.eye(size, device=state.device), update[:, size:], state[:, size:]])
        self._of_token, self._of_path = Product(of_token.to(dtype), bias.to(dtype)), Product(of_path.to(dtype))
        self.project = joined(injector.hidden_proj)
        self._down, self.up = joined(injector.down), joined(injector.up)

    def advance(self, embeds: torch.Tensor, states: torch.Tensor | None) -> torch.Tensor:
        size = self._size
        token = self._of_token(self._norm(embeds))
        update = token[..., : 2 * size]
        if states is not None:
            update = update + states[..., size : 3 * size]
        gate, candidate = update.chunk(2, dim=-1)
        gate, candidate = gate.sigmoid(), candidate.tanh()
        states = self._of_path(gate * candidate if states is None else torch.lerp(states[..., :size], candidate, gate))
        states[..., 3 * size :] += token[..., 2 * size :]
        return states

    def code(self, projected: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        gate, value = (projected + states[..., 3 * self._size :]).chunk(2, dim=-1)
        return self._down(F.silu(gate) * value)


class JoinedLowRankInjector:
    """A `LowRankInjector` with these products."""

    def __init__(self, injector: LowRankInjector, dtype: torch.dtype) -> None:
        self._norm = Norm(injector.norm, dtype)
        self._down, self.up = joined(injector.down), joined(injector.up)
        self.project, self.code = injector.project, injector.code

    def advance(self, embeds: torch.Tensor, states: torch.Tensor | None) -> torch.Tensor:
        return self._down(self._norm(embeds))


Injector = LowRankInjector | PathInjector | JoinedPathInjector | JoinedLowRankInjector


def _joined_injector(injector: LowRankInjector | PathInjector, dtype: torch.dtype) -> Injector:
    """As it is, if any of its products is more than a weight."""
    if not all(map(is_plain, (part for part in injector.children() if not isinstance(part, HSDraftRMSNorm)))):
        return injector
    joined_as = JoinedPathInjector if isinstance(injector, PathInjector) else JoinedLowRankInjector
    return joined_as(injector, dtype)  # type: ignore[arg-type]


@dataclass(frozen=True)
class WorkingWeights:
    """All of a drafter that decoding multiplies by.

    Attributes:
        fuse: of normed hidden states and embedding, side by side, their norms' weights in it.
        sources, eps: how many stand side by side, and of their norms.
        roll_norm, roll: from a drafted state to the next input.
        norm, head: from drafted states to draft logits.
    """

    fuse: Transform
    sources: int
    eps: float
    roll_norm: Norm
    roll: Transform
    layers: tuple[LayerWeights, ...]
    norm: Norm
    head: Transform
    injector: Injector

    @classmethod
    def of(cls, drafter: HSDrafter, weights: TargetWeights) -> WorkingWeights:
        dtype, norms = drafter.dtype, [*drafter.tap_norms, drafter.token_norm]
        scale = torch.cat([norm.weight for norm in norms])
        if is_plain(drafter.fuse):
            fuse: Transform = Product((drafter.fuse.weight.float() * scale.float()).to(dtype))
        else:
            fuse = _scaled(drafter.fuse, scale.detach().to(dtype))
        if drafter.lm_head is None:
            assert weights.head is not None
        return cls(
            fuse,
            len(norms),
            drafter.token_norm.eps,
            Norm(drafter.roll_norm, dtype),
            joined(drafter.roll_proj),
            tuple(LayerWeights.of(layer, dtype) for layer in drafter.layers),  # type: ignore[arg-type]
            Norm(drafter.norm, dtype),
            joined(drafter.lm_head) if drafter.lm_head is not None else Product(weights.head),  # type: ignore[arg-type]
            _joined_injector(drafter.injector, dtype),
        )

    def fuse_inputs(self, taps: torch.Tensor, embeds: torch.Tensor) -> torch.Tensor:
        """Trunk inputs `[n, D]`, as `HSDrafter.fuse_inputs` makes them."""
        parts = torch.cat([taps, embeds], dim=-1).view(len(taps), self.sources, -1)
        return self.fuse(F.rms_norm(parts, parts.shape[-1:], None, self.eps).flatten(1))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Draft logits `[..., V']` of drafted states `[..., D]`, before any token information."""
        return self.head(self.norm(hidden))


def _scaled(module: Transform, scale: torch.Tensor) -> Transform:
    return lambda x: module(x * scale)


_kept: weakref.WeakKeyDictionary[HSDrafter, tuple[_State, WorkingWeights]] = weakref.WeakKeyDictionary()


@torch.no_grad()
def working_weights(drafter: HSDrafter, weights: TargetWeights) -> WorkingWeights:
    """Those of a drafter with what it borrows; kept until either changes."""
    tensors = [*drafter.parameters(), *([] if weights.head is None else [weights.head])]
    plain = tuple(map(is_plain, drafter.modules()))
    kept = _kept.get(drafter)
    if kept is None or not kept[0].holds(tensors, plain):
        kept = _kept[drafter] = _State.of(tensors, plain), WorkingWeights.of(drafter, weights)
    return kept[1]


@dataclass(frozen=True)
class _State:
    """Which tensors there were, how often they had been written to, and which modules were plain."""

    tensors: tuple[weakref.ref[torch.Tensor], ...]
    versions: tuple[tuple[int, int], ...]
    plain: tuple[bool, ...]

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor], plain: tuple[bool, ...]) -> _State:
        return cls(tuple(map(weakref.ref, tensors)), _versions(tensors), plain)

    def holds(self, tensors: Sequence[torch.Tensor], plain: tuple[bool, ...]) -> bool:
        same = len(tensors) == len(self.tensors) and all(
            ref() is tensor for ref, tensor in zip(self.tensors, tensors, strict=True)
        )
        return same and plain == self.plain and _versions(tensors) == self.versions


def _versions(tensors: Sequence[torch.Tensor]) -> tuple[tuple[int, int], ...]:
    return tuple((tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version) for tensor in tensors)
