"""On CPUs, decoder layers run as compiled programs, which fuse everything but products and attention.

A layer of a small model dispatches some sixty operators, each of which takes longer to start than to run. Its program
starts ten. All layers of a kind share one program, which serves any number of texts and tokens; it is compiled once,
by another process, and kept on disk. Until it is there, and wherever it does not fit, layers run as they are.
"""

from __future__ import annotations

import contextlib
import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from ..core.stand_ins import standing_in
from .grouped_attention import is_in_place
from .known_layers import KnownLayers
from .layer_form import MASK, Form, arguments_of, cache_of, form_of
from .layer_operators import Step
from .layer_programs import Entry, Program, entry_of
from .packed_weights import joined_product
from .small_weights import KERNEL
from .whole_layers import Chain, Group, Nothing, Watch, are_close, chains_of
from .whole_model import WholeModel, nothing

# Least number of numbers of a layer's largest weight; forwards of smaller ones take little time anyway - by hand.
COMPILED_LEAST_NUMBERS = 2**16
# Number of kinds of layers beyond which a target is not compiled - by hand: each takes a compiler's time.
MOST_KINDS_OF_LAYERS = 4


class CompiledLayers:
    """The layers of a target in one call.

    Args:
        layers: decoder layers of the target.
        asked_for: the option `compiled_layers`.
        may_pack: returns whether weights are packed, or may be in this call; layers of the common form wait for that.
        target: whose layers these are; what is found out about them is kept for its later calls.
        model: what calls the layers in the target's forward.

    Attributes:
        running: whether a program or our operator runs.
        inside: linear layers that are not called where our operator runs.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        asked_for: bool | None,
        may_pack: Callable[[], bool] = lambda: False,
        target: Any = None,
        model: Any = None,
    ) -> None:
        self._at_once, self._may_pack, self.running, self._groups = bool(asked_for), may_pack, False, list[Group]()
        self._chains, self.whole = list[Chain](), True
        self.inside, self.separate = frozenset[nn.Module](), nothing
        self._layers: dict[Any, _Layer] = {}
        self._model: dict[Any, WholeModel] = {}
        self._waiting: dict[str, tuple[Entry, nn.Module, Form]] = {}
        self._last: _Call | None = None
        if asked_for is False or sys.platform != "linux" or not layers:
            return
        known = KnownLayers.of(layers, target)
        if not known.largest or not (asked_for or known.largest >= COMPILED_LEAST_NUMBERS):
            return
        if len(set(known.descriptions.values())) > MOST_KINDS_OF_LAYERS:
            return
        for place, layer in enumerate(layers):
            if layer in known.descriptions:
                watch = known.watch(place, place + 1, False)
                self._layers[layer] = _Layer(self, layer, known.descriptions[layer], watch)
        if len(self._layers) == len(layers):
            self._chains = chains_of(known.descriptions, self.joins, known.watch)
        if KERNEL.operators() is not None or KERNEL.may_come:
            for chain in filter(Chain.may_run, self._chains):  # before packing, else weights are packed twice
                self.joins(chain.groups)
        for chain in self._chains:
            for place, layer in enumerate(chain.layers):
                self._layers[layer].chain, self._layers[layer].place = chain, place
        self.inside = frozenset(linear for chain in self._chains for group in chain.groups for linear in group)
        if model is not None and WholeModel.may_be(model, self._chains):
            self._model[model] = WholeModel(model, self._chains[0], self.form_of, self.note)

    @contextlib.contextmanager
    def in_use(self, whole: bool = True, separate: Callable[[], None] = nothing) -> Iterator[None]:
        """Within, in this thread, layers run by our operator, if the `whole` target runs, or as programs.

        `separate` is called before a layer calls those `inside` it.
        """
        self.whole, self.separate = whole, separate
        if not self._layers or not is_in_place():
            separate()
            yield
            return
        models = self._model if whole else {}
        try:
            with standing_in({**models, **self._layers}, self._layers if models else ()) as place_layers:
                for model in models.values():
                    model.place_layers = place_layers
                yield
        finally:
            for model in models.values():
                model.place_layers = nothing
            for chain in self._chains:
                chain.leave()

    def note(self) -> None:
        """Notes that a program or our operator has run."""
        self.running = True

    def after_forward(self) -> bool:
        """Counts a forward, and returns whether layers run as programs from the next one on that did not before."""
        if self._at_once and any(chain.waits for chain in self._chains):
            KERNEL.operators(wait=True)
        ready = [entry.after_forward(layer, form, self._at_once) for entry, layer, form in self._waiting.values()]
        self._waiting.clear()
        return any(ready)

    def new_groups(self) -> list[Group]:
        """Layers whose products programs join, those that were not returned before."""
        groups, self._groups = self._groups, []
        return groups

    def joins(self, groups: Sequence[Group]) -> None:
        """Notes what runs only if these products are joined, or joins them itself."""
        self._groups += groups

    def waits(self, chain: Chain | None) -> bool:
        """Whether layers will run by our operator soon, and need no program."""
        return chain is not None and chain.waits and self._may_pack()

    def form_of(self, hidden_states: torch.Tensor, kwargs: dict[str, Any]) -> tuple[Form, list[torch.Tensor]] | None:
        """As `layer_form.form_of`; most layers of a forward are called with the same keywords."""
        last, sizes = self._last, (hidden_states.shape, hidden_states.dtype)
        if (
            last is not None
            and last.sizes == sizes
            and last.kwargs.keys() == kwargs.keys()
            and hidden_states.is_contiguous()
            and all(map(operator.is_, last.kwargs.values(), kwargs.values()))
        ):
            return last.form, [hidden_states, *last.tensors[1:]]
        found = form_of(hidden_states, kwargs)
        self._last = None if found is None else _Call(sizes, kwargs, *found)
        return found

    def wait_for(self, entry: Entry, layer: nn.Module, form: Form) -> None:
        if not entry.why_not:
            self._waiting.setdefault(entry.key, (entry, layer, form))


class _Call(NamedTuple):
    """The last call of a layer."""

    sizes: tuple[torch.Size, torch.dtype]
    kwargs: dict[str, Any]
    form: Form
    tensors: list[torch.Tensor]


class _Layer:
    """Stands in for a layer."""

    def __init__(self, owner: CompiledLayers, layer: nn.Module, description: str, watch: Watch) -> None:
        self._owner, self.description = owner, description
        self.chain: Chain | None = None
        self.place = 0
        self._hooks, self._watch = layer._forward_hooks, watch
        self._entries: dict[Form, Entry] = {}
        self._bound: dict[tuple[int, bool, bool], _Bound] = {}

    def run(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        usual = len(args) == 1 and not torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")
        output = NotImplemented
        if usual and self.chain is not None and self._owner.whole:
            output = self.chain.run(self.place, args[0], kwargs, self._owner.form_of)
        if output is NotImplemented:
            self._owner.separate()
            output = self._by_program(layer, args, kwargs) if usual else output
            if output is NotImplemented:
                return output
        self._owner.note()
        return _after_hooks(layer, args, kwargs, output) if self._hooks else output

    def _by_program(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._watch.sees():
            return NotImplemented
        found = self._owner.form_of(args[0], kwargs)
        if found is None:
            return NotImplemented
        form, tensors = found
        entry = self._entries.get(form)
        if entry is None:
            entry = self._entries[form] = entry_of(self.description, form)
        program = entry.program
        if program is None:
            if not self._owner.waits(self.chain):
                self._owner.wait_for(entry, layer, form)
            return NotImplemented
        sizes = args[0].shape[0] > 1, args[0].shape[1] > 1
        bound = self._bound.get((id(entry), *sizes))
        if bound is None:
            bound = self._tried(layer, program, entry, form, tensors)
            if bound is None:
                return NotImplemented
            self._bound[id(entry), *sizes] = bound
        if not bound.fits():
            return NotImplemented
        return bound(tensors, cache_of(kwargs), kwargs.get(MASK))

    def _tried(
        self, layer: Any, program: Program, entry: Entry, form: Form, tensors: list[torch.Tensor]
    ) -> _Bound | None:
        """The program with this layer's weights, if it computes what the layer does."""
        try:
            bound = _Bound(layer, program)
            sizes = tensors[0].shape[0] > 1, tensors[0].shape[1] > 1
            right = sizes in entry.tried or bound.agrees(layer, form, tensors)
        except Exception as error:  # a package of something else
            right, entry.why_not = False, f"its program fails: {error}"
        if not right:
            entry.program, entry.why_not = None, entry.why_not or "its program computes something else"
            return None
        entry.tried.add(sizes)
        self._owner.joins(bound.groups)
        return bound


class _Bound:
    """A program with the weights of one layer."""

    def __init__(self, layer: nn.Module, program: Program) -> None:
        part: Any = layer.get_submodule
        self._program = program
        self._weights = [_place_of(layer, name) for name in program.needs.weights]
        self._kinds = [_kind_of(held[name]) for held, name in self._weights]
        self._index_of = part(program.needs.index_of)
        self.groups: list[Group] = [tuple(map(part, names)) for names in program.needs.products]
        self._products = [partial(joined_product, group) for group in self.groups]

    def fits(self) -> bool:
        """Whether the weights still have the shapes and types that the program was made for."""
        return all(_kind_of(held[name]) == kind for (held, name), kind in zip(self._weights, self._kinds, strict=True))

    def __call__(self, tensors: list[torch.Tensor], cache: Any, mask: torch.Tensor | None) -> Any:
        weights = [held[name] for held, name in self._weights]
        return self._program([*weights, *tensors], Step(self._products, cache, self._index_of.layer_idx, mask))

    def agrees(self, layer: Any, form: Form, tensors: list[torch.Tensor]) -> bool:
        """Whether it computes what the layer does, but for rounding, for these inputs without a past."""
        rows, count = tensors[0].shape[:2]
        mask = torch.ones(count, count, dtype=torch.bool).tril().expand(rows, 1, count, count)
        nothing = Nothing()
        hidden_states, kwargs = arguments_of(form, tensors, mask, nothing)
        expected = type(layer).forward(layer, hidden_states, **kwargs)
        found = self(tensors, nothing, mask)
        pairs = zip(*(each if isinstance(each, tuple) else (each,) for each in (expected, found)), strict=True)
        return all(are_close(a, b, hidden_states) for a, b in pairs)


def _kind_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    return type(tensor), tensor.dtype, tensor.shape, tensor.stride()


def _place_of(layer: nn.Module, name: str) -> tuple[dict[str, Any], str]:
    """Where a module holds a parameter or buffer; another one may be put there."""
    owner, _, own = name.rpartition(".")
    held = vars(layer.get_submodule(owner))
    return held["_parameters"] if own in held["_parameters"] else held["_buffers"], own


def _after_hooks(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    for number, hook in tuple(layer._forward_hooks.items()):
        given = (args, kwargs) if number in layer._forward_hooks_with_kwargs else (args,)
        changed = hook(layer, *given, output)
        output = output if changed is None else changed
    return output
