"""On CPUs with our kernel, consecutive decoder layers of the most common form run in one call of an operator.

Such a layer adds attention and an MLP to its input, both after a norm; decoder.h computes it. The first of the layers
runs all of them, and each later one returns what is known, if it is called with what the one before returned.
Otherwise layers run by themselves. A layer's keys and values enter the cache when it is called, as plain decoding's do.
"""

from __future__ import annotations

import operator
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers.activations import ACT2FN
from transformers.utils import output_capturing

from ..core.stand_ins import in_use
from .few_queries import attends
from .grouped_attention import is_known, joins_heads
from .layer_form import MASK, arguments_of, cache_of, read_of
from .packed_weights import PackedLinears, small_rows
from .small_weights import KERNEL, SmallCopy

# By how many times the precision of their dtype two ways to sum may differ, relative to their size - by hand.
ROUNDED_SUMS = 16.0

Group = tuple[nn.Linear, ...]

_MODELS = ("llama", "mistral", "qwen2", "qwen3", "gemma3")  # of transformers, whose layers have this form
_CODE = Path(transformers.__file__).parent
_PRODUCTS = (  # in the order of decoder.h
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)
_ACTIVATIONS = {"silu": 0, "gelu_pytorch_tanh": 1}
_ANGLES = "position_embeddings"
_MOST_REPORTS = 3  # forwards after which products that are not joined yet will not be
_BY_US, _BY_HEAD, _BY_KEYS = range(3)  # how decoder.h attends
_VERSION = operator.attrgetter("_version")
_tried: dict[Any, bool] = {}  # whether the operator computes what a layer does, by description and sizes


class Watch:
    """Notices what was changed in layers since, and hooks that see what passes through their parts.

    `weights`: whether another weight in the place of one is a change.
    """

    def __init__(self, layers: Iterable[nn.Module], weights: bool) -> None:
        places, self._before, self._inside = list[tuple[dict[str, Any], str, Any]](), list[Any](), list[Any]()
        for layer in layers:
            for module in layer.modules():
                own = vars(module)
                places += [(own, name, own[name]) for name in read_of(module)]
                places += [(own["_modules"], name, part) for name, part in own["_modules"].items()]
                if weights:
                    places += [(own["_parameters"], name, weight) for name, weight in own["_parameters"].items()]
                places.append((own, "forward", own.get("forward")))
                self._before.append(own["_forward_pre_hooks"])
                if module is not layer:
                    self._inside.append(own["_forward_hooks"])
        self._held, self._names, self._values = zip(*places, strict=True)

    def sees(self) -> bool:
        """Whether there is a change, or a hook that may see or change something."""
        if any(self._before) or not all(map(operator.is_, map(dict.get, self._held, self._names), self._values)):
            return True
        return any(not all(map(is_silent, hooks.values())) for hooks in filter(None, self._inside))


def hooks_now() -> tuple[int, frozenset[str]]:
    """What changes when a hook is registered anywhere, or when other outputs are captured."""
    return RemovableHandle.next_id, frozenset(output_capturing._active_collector.get() or ())


def is_silent(hook: Any) -> bool:
    """Whether a hook is one by which transformers captures outputs, of a kind that this forward does not capture."""
    if getattr(hook, "__module__", None) != output_capturing.__name__:
        return False
    try:
        key = dict(zip(hook.__code__.co_freevars, hook.__closure__, strict=True))["key"].cell_contents
    except (AttributeError, KeyError, TypeError):  # another version of transformers
        return False
    wanted = output_capturing._active_collector.get()
    return wanted is None or key not in wanted


class Nothing:
    """A cache that returns its input."""

    def update(self, keys: Any, values: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return keys, values


def are_close(expected: torch.Tensor, found: torch.Tensor, entered: torch.Tensor) -> bool:
    """Whether outputs differ by no more than rounding, relative to what the layer has added to its inputs."""
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return False
    added = expected.float() - (entered.float() if entered.shape == expected.shape else 0.0)
    largest = ROUNDED_SUMS * torch.finfo(expected.dtype).eps
    rounding = torch.finfo(expected.dtype).eps * expected.float().norm()
    return bool((expected.float() - found.float()).norm() <= largest * added.norm() + rounding)


def chains_of(
    descriptions: Mapping[Any, str],
    report: Callable[[Sequence[Group]], None],
    watch_of: Callable[[int, int, bool], Watch],
) -> list[Chain]:
    """Chains of those among layers, given with their descriptions, that follow each other and have the same one.

    `report` gets linear layers whose products the operator joins. `watch_of` returns a watch over layers from the
    first to before another one.
    """
    chains, first, described = list[Chain](), 0, list(descriptions.items())
    for place in range(1, len(described) + 1):
        if place == len(described) or described[place][1] != described[first][1]:
            layers = [layer for layer, _ in described[first:place]]
            if _is_common(layers[0]):
                chains.append(Chain(layers, described[first][1], report, watch_of(first, place, True)))
            first = place
    return chains


def _is_common(layer: Any) -> bool:
    """Whether a layer has the form that the operator computes."""
    names = {name for name, _ in layer.named_modules()} - {"", "self_attn", "mlp", "mlp.act_fn"}
    if not any(name.startswith("self_attn.") for name in names):
        return False
    linears, norms = {name for group in _PRODUCTS for name in group}, set(filter(None, _norms_of(layer)))
    if names != linears | norms or len(norms) % 2 or not all(map(is_transformers_own, set(map(type, layer.modules())))):
        return False
    module, config, attention = sys.modules[type(layer).__module__], layer.self_attn.config, layer.self_attn
    functions = [getattr(module, name, None) for name in ("apply_rotary_pos_emb", "rotate_half")]
    sizes = {attention.head_dim % 32, attention.o_proj.out_features % 16, layer.mlp.down_proj.in_features % 16}
    return (
        all(map(is_code_of_transformers, functions))
        and config._attn_implementation == "sdpa"
        and not layer.training
        and not getattr(config, "attn_logit_softcapping", None)
        and sizes == {0}
        and attention.head_dim <= 256
        and _activation_of(layer) is not None
    )


def _norms_of(layer: Any) -> list[str | None]:
    """The names of a layer's norms as the operator takes them; `None` for those that it lacks."""
    of_attention = ["self_attn.q_norm", "self_attn.k_norm"] if hasattr(layer.self_attn, "q_norm") else [None, None]
    middle, end = "pre_feedforward_layernorm", "post_feedforward_layernorm"
    if not hasattr(layer, middle):
        return ["input_layernorm", *of_attention, None, "post_attention_layernorm", None]
    return ["input_layernorm", *of_attention, "post_attention_layernorm", middle, end]


def _activation_of(layer: Any) -> int | None:
    kinds = [number for name, number in _ACTIVATIONS.items() if type(layer.mlp.act_fn) is type(ACT2FN[name])]
    return kinds[0] if kinds else None


def is_transformers_own(kind: type) -> bool:
    """Whether a class is torch's linear layer, or a known model's of transformers, with its forward as it came."""
    if kind is nn.Linear:
        return True
    place, forward = kind.__module__.split("."), getattr(kind, "forward", None)
    known = place[:2] == ["transformers", "activations"] or (
        place[:2] == ["transformers", "models"] and place[2] in _MODELS
    )
    return known and forward is not None and is_code_of_transformers(forward)


def is_code_of_transformers(function: Any) -> bool:
    """Whether a function, and all that it wraps, is from a file of transformers."""
    while isinstance(function, types.FunctionType):
        if not Path(function.__code__.co_filename).is_relative_to(_CODE):
            return False
        if not hasattr(function, "__wrapped__"):
            return True
        function = function.__wrapped__
    return False


@dataclass
class Ahead:
    """What was computed for layers that are called later, or never."""

    outputs: Mapping[int, torch.Tensor]  # by layer
    kwargs: dict[str, Any]
    states: list[tuple[Any, torch.Tensor, torch.Tensor]]  # each layer of the cache or room, its keys and values then
    normed: torch.Tensor | None = None  # the last output, if that was asked for
    next: int = 0

    def enter(self) -> None:
        """Puts all keys and values into the cache."""
        for layer, keys, values in self.states:
            layer.keys, layer.values = keys, values


class Room:
    """Keys and values of a layer before the first of so many tokens, in the place of a cache's layer."""

    def __init__(self, x: torch.Tensor, heads: int, size: int) -> None:
        self.rooms = [x.new_empty(x.shape[0], heads, x.shape[1], size) for _ in range(2)]
        self.keys, self.values = (room[:, :, :0] for room in self.rooms)

    def make_rooms(self, count: int) -> None:
        pass


Parts = tuple[list[Any], list[int]]  # the tensors of all layers, and the formats of their products' copies


class Chain:
    """Layers of the common form and of one description, which follow each other.

    Attributes:
        layers: these.
        description: of each.
        groups: the linear layers of each product of each layer.
        waits: whether a later forward may run them, as their weights or the kernel are not ready yet.
        hooked: whether hooks see what a layer returns, as found by `changed`.
    """

    def __init__(
        self, layers: list[Any], description: str, report: Callable[[Sequence[Group]], None], watch: Watch
    ) -> None:
        self.layers, self.description, self.waits, self.hooked = layers, description, False, False
        self._report, self._watch = report, watch
        self._looked: tuple[int, frozenset[str]] | None = None
        names = _norms_of(layers[0])
        self._norms: list[list[Any]] = [[name and layer.get_submodule(name) for name in names] for layer in layers]
        self.groups: list[Group] = [tuple(map(layer.get_submodule, group)) for layer in layers for group in _PRODUCTS]
        self._firsts = [group[0] for group in self.groups]
        self._packed, self._weights = list[Any](), list[torch.Tensor]()
        self._parts: Parts | None = None
        self._most_rows = sys.maxsize
        self._written = self._stamps()
        self._ahead: Ahead | None = None
        self._apart, self._reports = False, 0
        attention, norm = layers[0].self_attn, layers[0].input_layernorm
        size, from_zero = attention.head_dim, hasattr(norm, "eps")  # Gemma's norm
        self._eps_name = "eps" if from_zero else "variance_epsilon"
        self._heads = [attention.q_proj.out_features // size, attention.k_proj.out_features // size, size]
        self._kind = [_activation_of(layers[0]), int(from_zero)]
        eps = [vars(each)[self._eps_name] for each in (norm, getattr(attention, "q_norm", norm))]
        self._scales = [*map(float, eps), float(attention.scaling)]

    def run(self, place: int, x: torch.Tensor, kwargs: dict[str, Any], form_of: Callable[..., Any]) -> Any:
        """The output of the layer at `place`, or `NotImplemented`."""
        ahead = self._ahead
        if ahead is not None:
            if self._follows(ahead, place, x, kwargs):
                return self._next(ahead)
            self.leave()
        return NotImplemented if place or self._apart else self._begin(x, kwargs, form_of)

    def may_run(self) -> bool:
        """Whether no hook and no inference mode keeps the layers from running together."""
        return not torch.is_inference_mode_enabled() and not self.changed()

    def changed(self) -> bool:
        """Whether layers were changed, or have hooks that may see or change something inside them.

        Hooks count at once, and writes to weights by `ready`; attributes, parts and parameters are compared once a
        call, and when hooks were registered since.
        """
        now = hooks_now()
        if now != self._looked:
            self._looked = None
            if self._watch.sees():
                return True
            self.hooked = not all(is_silent(hook) for layer in self.layers for hook in layer._forward_hooks.values())
            self._looked = now
        return False

    def leave(self) -> None:
        """Forgets what layers that were not called have computed, if any; then layers run by themselves."""
        self._apart |= self._ahead is not None
        self._ahead = None

    def _next(self, ahead: Ahead) -> torch.Tensor:
        """The output of the next layer, whose keys and values enter the cache."""
        output, (layer, keys, values) = ahead.outputs[ahead.next], ahead.states[ahead.next]
        layer.keys, layer.values = keys, values
        ahead.next += 1
        self._ahead = ahead if ahead.next < len(self.layers) else None
        return output

    @staticmethod
    def _follows(ahead: Ahead, place: int, x: torch.Tensor, kwargs: dict[str, Any]) -> bool:
        return (
            place == ahead.next
            and x is ahead.outputs[place - 1]
            and x._version == 0
            and kwargs.keys() == ahead.kwargs.keys()
            and all(map(operator.is_, kwargs.values(), ahead.kwargs.values()))
        )

    def _begin(self, x: torch.Tensor, kwargs: dict[str, Any], form_of: Callable[..., Any]) -> Any:
        parts = self.ready(x.shape[0] * x.shape[1])
        owns = None if parts is None else self.held_by(cache_of(kwargs))
        ahead = parts and owns and self.together(parts, x, kwargs, owns, form_of, range(len(owns)))
        return self._next(ahead) if ahead else NotImplemented

    def held_by(self, cache: Any) -> list[Any] | None:
        """The layers of a cache that hold what these have read, with room to grow; `None` for others."""
        held, places = [] if cache is None else cache.layers, [layer.self_attn.layer_idx for layer in self.layers]
        if len(held) <= max(places):  # a cache adds layers as they are called
            return None
        owns = [held[place] for place in places]
        grow = all(getattr(own, "rooms", None) and own.keys is not None for own in owns)
        return owns if grow and owns[0].keys.shape[-2] else None

    def rooms_for(self, x: torch.Tensor) -> list[Room]:
        """Where the layers may put their keys and values of the first tokens of texts."""
        _, heads, size = self._heads
        return [Room(x, heads, size) for _ in self.layers]

    def ready(self, rows: int) -> Parts | None:
        """What `together` reads for so many tokens; `None` where layers have to run by themselves."""
        self.waits = False
        if not self.may_run():
            return None
        if KERNEL.operators() is None:
            self.waits = KERNEL.may_come
            return None
        return self._parts_in(rows)

    def together(
        self,
        parts: Parts,
        x: torch.Tensor,
        kwargs: dict[str, Any],
        owns: Sequence[Any],
        form_of: Callable[..., Any],
        wanted: Sequence[int],
        norm: torch.Tensor | None = None,
    ) -> Ahead | None:
        """What the layers make of the first one's input and keywords; `None` where they have to run by themselves.

        `owns` are the layers of the cache, or rooms; `wanted` are the layers whose outputs are returned; `norm` is the
        weight of a norm after the last layer, see `weight_of`.
        """
        mask, end = kwargs.get(MASK), owns[0].keys.shape[-2] + x.shape[1]
        if mask is None and 1 < x.shape[1] < end:  # sdpa's `is_causal` counts from the first key
            return None
        if mask is not None and (mask.shape[0] not in (1, len(x)) or mask.shape[1:] != (1, x.shape[1], end)):
            return None
        if not _is_usual(x, kwargs) or not self._agrees(parts, x, kwargs, form_of):
            return None
        made = self._decoded(parts, x, kwargs, owns, mask, wanted, norm)
        if not made:
            for own in owns:
                own.make_rooms(x.shape[1])
            made = self._decoded(parts, x, kwargs, owns, mask, wanted, norm)
        if not made:
            return None
        held = made[len(wanted) : len(wanted) + 2 * len(owns)]
        outputs, states = dict(zip(wanted, made, strict=False)), zip(owns, held[::2], held[1::2], strict=True)
        return Ahead(outputs, kwargs, list(states), None if norm is None else made[-1])

    def weight_of(self, norm: nn.Module, dtype: torch.dtype) -> torch.Tensor | None:
        """The weight of a norm that computes what those before attention do; `None` for others, or with hooks."""
        first, own = self._norms[0][0], vars(norm)
        if type(norm) is not type(first) or any(own[hooks] for hooks in ("_forward_hooks", "_forward_pre_hooks")):
            return None
        weight, replaced = norm.weight, own.get("forward") is not None or own.get("_compiled_call_impl") is not None
        if replaced or vars(norm).get(self._eps_name) != vars(first).get(self._eps_name):
            return None
        return weight if isinstance(weight, torch.Tensor) and weight.dtype == dtype and weight.is_contiguous() else None

    def _parts_in(self, rows: int) -> Parts | None:
        """The parts as the operator takes them; `None` while some are not packed, and where a weight was written to."""
        packed: list[Any] = list(map(in_use.get().get, self._firsts))
        if packed != self._packed:
            self._parts, self._packed = None, []
            if not self._are_ready(packed):
                return None
            self.waits = False
            self._packed, self._parts = packed, self._bound(packed)
            self._written = self._stamps()
        if self._parts is None or self._stamps() != self._written:
            return None
        return self._parts if rows <= self._most_rows else None

    def _are_ready(self, packed: Sequence[Any]) -> bool:
        """Whether each product has a packed copy; reports products that have to be joined."""
        are_packed = [isinstance(copy, PackedLinears) for copy in packed]
        if not all(are_packed):
            self.waits = not any(are_packed)
            return False
        if not all(copy.linears == group for copy, group in zip(packed, self.groups, strict=True)):
            self._reports += 1
            self.waits = self._reports <= _MOST_REPORTS
            self._report(self.groups if self.waits else [])
            return False
        self.waits = True
        return all(copy.made for copy in packed)

    def _stamps(self) -> tuple[list[int], list[int]]:
        """What changes when a weight is written to, or put somewhere else."""
        return list(map(torch.Tensor.data_ptr, self._weights)), list(map(_VERSION, self._weights))

    def _bound(self, packed: Sequence[PackedLinears]) -> Parts | None:
        """As `_parts_in`; `None` where they are others than the operator takes."""
        copies, parts = [copy.copy for copy in packed], list[Any]()
        biases = [[linear.bias for linear in group] for group in self.groups]
        if any(copy is None for copy in copies) or not all(copy.unchanged_now for copy in packed):
            return None
        for place, norms in enumerate(self._norms):
            of_layer = slice(4 * place, 4 * place + 4)
            parts += [None if norm is None else norm.weight for norm in norms]
            parts += [copy.blocks if isinstance(copy, SmallCopy) else copy for copy in copies[of_layer]]
            parts += [copy.scales if isinstance(copy, SmallCopy) else None for copy in copies[of_layer]]
            parts += [bias for group in biases[of_layer] for bias in group]
        own = [norm.weight for norms in self._norms for norm in norms if norm is not None]
        own += [bias for group in biases for bias in group if bias is not None]
        weights = [*(part for copy in packed for part in copy.parts), *own]
        dtype = packed[0].linears[0].weight.dtype
        plain = all(each.dtype == dtype and each.is_contiguous() for each in own)
        joint = all(len({bias is None for bias in group}) == 1 for group in biases)
        if not (plain and joint) or any(map(torch.Tensor.is_inference, weights)):  # these have no version
            return None
        self._weights = weights
        self._most_rows = small_rows(dtype) if any(isinstance(copy, SmallCopy) for copy in copies) else sys.maxsize
        return parts, [copy.format if isinstance(copy, SmallCopy) else -1 for copy in copies]

    def _decoded(
        self,
        parts: Parts,
        x: torch.Tensor,
        kwargs: dict[str, Any],
        cache: Sequence[Any],
        mask: torch.Tensor | None,
        wanted: Sequence[int],
        norm: torch.Tensor | None = None,
    ) -> list[torch.Tensor]:
        """Outputs of the `wanted` among the first layers, as many as `cache` has, then keys and values of each.

        With a `norm`, that of the last output follows. Nothing if the cache lacks room.
        """
        rooms = [room for own in cache for room in own.rooms]
        if any(room is None for room in rooms):
            return []
        held = [states for own in cache for states in (own.keys, own.values)]
        heads, key_heads, _ = self._heads
        batch, n = x.shape[:2]
        way = _BY_US
        if not attends(x.dtype, heads // key_heads * n):
            may_join = mask is not None or n == 1  # torch's own causal mask is of a single head
            joins = may_join and joins_heads(batch, heads, key_heads, n, held[0].shape[-2] + n)
            way = _BY_KEYS if joins else _BY_HEAD
        layers, form = len(cache), [*self._heads, way, *self._kind]
        size = len(parts[0]) // len(self.layers) * layers
        given = parts[0][:size], held, rooms, list(wanted), parts[1][: 4 * layers], form, self._scales
        return KERNEL.operators().decode(x, *kwargs[_ANGLES], mask, norm, *given)

    def _agrees(self, parts: Parts, x: torch.Tensor, kwargs: dict[str, Any], form_of: Callable[..., Any]) -> bool:
        """Whether the operator computes what the first layer does, but for rounding, without a past; tried once."""
        (batch, count), causal = x.shape[:2], kwargs.get(MASK) is None
        key = (self.description, x.dtype, batch > 1, count > 1, causal)
        if key not in _tried:
            seen = torch.ones(count, count, dtype=torch.bool).tril().expand(batch, 1, count, count).contiguous()
            found = form_of(x, kwargs | {MASK: seen})
            if found is None:
                return False
            mask = None if causal else seen
            form, tensors = found
            hidden_states, given = arguments_of(form, tensors, mask, Nothing())
            layer = self.layers[0]
            expected = type(layer).forward(layer, hidden_states, **given)
            try:
                made = self._decoded(parts, x, kwargs, self.rooms_for(x)[:1], mask, [0])
            except RuntimeError:  # torch's packed product takes something else
                made = []
            _tried[key] = bool(made) and isinstance(expected, torch.Tensor) and are_close(expected, made[0], x)
        return _tried[key]


def _is_usual(x: torch.Tensor, kwargs: dict[str, Any]) -> bool:
    """Whether a call gives a layer no more than the operator reads, of a tree or of a single token."""
    angles, mask = kwargs.get(_ANGLES), kwargs.get(MASK)
    if not x.is_contiguous() or x.is_inference() or not (isinstance(angles, tuple) and len(angles) == 2):
        return False
    if any(each.dtype != x.dtype or each.dim() != 3 or not each.is_contiguous() for each in angles):
        return False
    if mask is not None and (mask.dim() != 4 or mask.stride(3) != 1 or mask.dtype not in (torch.bool, x.dtype)):
        return False
    cache = cache_of(kwargs)
    return all(name in (_ANGLES, MASK) or value is cache or is_known(name, value) for name, value in kwargs.items())
