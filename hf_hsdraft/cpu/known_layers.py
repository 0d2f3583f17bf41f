"""What is known about a target's decoder layers, for as long as nothing that it follows from has changed."""

from __future__ import annotations

import contextlib
import operator
import weakref
from collections.abc import Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from ..core.stand_ins import is_compiled
from .layer_form import described_config, described_kind, description_of, is_fixed, plain, read_of
from .whole_layers import Watch

_FORM = operator.attrgetter("shape", "dtype", "device")


class KnownLayers:
    """Layers with their descriptions.

    Attributes:
        descriptions: by layer; those that cannot be described are missing.
        largest: the size of each layer's largest weight, or of the layer where that is least; 0 if something is
            compiled, or if a layer has no product on a CPU alone.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._layers, self.descriptions, described = list(layers), dict[Any, str](), dict[Any, str]()
        self._watches = dict[tuple[int, int, bool], Watch]()
        self._modules = [module for layer in layers for module in layer.modules()]
        owns = list(map(vars, self._modules))
        self._kept = _holders_of(owns), [list(own["_buffers"].values()) for own in owns]  # so that no id is reused
        self._kinds: list[Any] = list(dict.fromkeys(map(type, self._modules)))
        values = [vars(module)[name] for module in self._modules for name in read_of(module)]
        self._configs = list({id(each): each for each in values if isinstance(each, PreTrainedConfig)}.values())
        self._others = [each for each in values if not (isinstance(each, PreTrainedConfig) or is_fixed(each))]
        compiled = any(map(is_compiled, self._modules))
        self.largest = 0 if compiled or not layers else min(map(_largest_weight, layers))
        for layer in layers if self.largest else ():
            try:
                self.descriptions[layer] = description_of(layer, described)
            except Exception:  # attributes and weights of other libraries may not be describable
                continue
        self._before: Any = None
        if len(self.descriptions) == len(layers) and not any("_compiled_call_impl" in own for own in owns):
            with contextlib.suppress(Exception):
                self._before = self._state()

    @classmethod
    def of(cls, layers: Sequence[nn.Module], target: Any = None) -> KnownLayers:
        """What an earlier call with this target has found out, if it still holds."""
        known = _known.get(target) if target is not None else None
        if known is None or not known._holds(layers):
            known = cls(layers)
            if target is not None:
                _known[target] = known
        return known

    def watch(self, first: int, end: int, weights: bool) -> Watch:
        """A `Watch` over some of the layers as they are now; taken at the beginning of a call only."""
        key = first, end, weights
        if key not in self._watches:
            self._watches[key] = Watch(self._layers[first:end], weights)
        return self._watches[key]

    def _holds(self, layers: Sequence[nn.Module]) -> bool:
        if self._before is None or list(map(id, layers)) != list(map(id, self._layers)):
            return False
        try:
            return not self.watch(0, len(layers), True).sees() and self._state() == self._before
        except Exception:  # of what has become indescribable
            return False

    def _state(self) -> tuple[Any, ...]:
        """What descriptions follow from and a `Watch` does not see."""
        self.watch(0, len(self._layers), True)
        holders = _holders_of(list(map(vars, self._modules)))
        tensors = [each for held in holders[2] for each in held.values() if each is not None]
        return (
            list(map(type, self._modules)),
            [(list(map(id, each)), list(map(len, each))) for each in holders],
            [(id(each), *_FORM(each), each.stride()) for each in tensors],
            [(kind.forward, described_kind(kind)) for kind in self._kinds],
            list(map(described_config, self._configs)),
            list(map(plain, self._others)),
        )


def _holders_of(owns: list[dict[str, Any]]) -> tuple[list[Any], list[Any], list[Any]]:
    """Where modules hold what they have: themselves, their parts, and their tensors."""
    tensors = [own[name] for own in owns for name in ("_parameters", "_buffers")]
    return owns, [own["_modules"] for own in owns], tensors


_known: weakref.WeakKeyDictionary[Any, KnownLayers] = weakref.WeakKeyDictionary()


def _largest_weight(layer: nn.Module) -> int:
    weights = [module.weight for module in layer.modules() if type(module) is nn.Linear]
    return 0 if any(each.device.type != "cpu" for each in weights) else max((w.numel() for w in weights), default=0)
