"""Adapters of a drafter (LoRA and others of PEFT), chosen by name for one call.

PEFT keeps the choice of an adapter on the layers, where another thread may change it during a call. So a call drafts by
a *view* of the drafter: copies of the modules that hold adapters and of the modules above them, with the choice of this
call. All weights are shared. A view is kept while its drafter is unchanged, as memories and measurements belong to it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ...core.checks import demand
from ...core.refusals import DraftingRefused

_Choice = tuple[tuple[str, ...], bool]  # active adapters of a layer, and whether it uses them


def adapter_names(drafter: Any) -> list[str]:
    """Returns the names of the adapters that a drafter holds, sorted."""
    return sorted({name for layer in _layers(drafter) for name in layer._get_available_adapters()})


def check_adapter_name(drafter: Any, name: Any) -> None:
    """Raises a ValueError unless a drafter holds an adapter of this name; "" and None are always valid."""
    if name is None or name == "":
        return
    known = adapter_names(drafter)
    listed = f"None for the active adapters, '' for none, or one of {', '.join(map(repr, known))}"
    missing = "None or '', as this drafter holds no adapters; drafter.load_adapter(folder, adapter_name=...) loads one"
    demand(name in known, "adapter_name", name, f"expected {listed if known else missing}")


def adapted(drafter: Any, name: str | None = None) -> Any:
    """Returns a view of a drafter whose choice of adapters cannot change, or the drafter itself if it holds none.

    Args:
        drafter: a `Drafter`, also one that holds others.
        name: of its adapter to use; "" for none, None for those that are active now.

    Raises a DraftingRefused if a name is given and adapters are merged into the weights, or modules cannot be copied.
    """
    layers = _layers(drafter)
    if not layers:
        return drafter
    choices = {layer: _active(layer) if name is None else ((name,) if name else (), bool(name)) for layer in layers}
    if fault := _fault(drafter, layers if name is not None else ()):
        if name is None:
            return drafter
        raise DraftingRefused(f"adapter_name={name!r} cannot be used with this drafter: {fault}")
    key = tuple(choices.values())
    with _lock:
        views = _views.setdefault(drafter, {})
        if key not in views or not views[key].is_of(drafter):
            for other in [other for other, view in views.items() if not view.is_of(drafter)]:
                del views[other]
            views[key] = _View.of(drafter, choices)
        return views[key].drafter


def _modules(drafter: Any) -> Iterator[nn.Module]:
    """The modules of a drafter, or of the drafters that it holds."""
    for root in (drafter,) if isinstance(drafter, nn.Module) else vars(drafter).values():
        if isinstance(root, nn.Module):
            yield from root.modules()


def _layers(drafter: Any) -> list[Any]:
    """The modules to which PEFT has added adapters."""
    return list(dict.fromkeys(each for each in _modules(drafter) if hasattr(each, "_active_adapter")))


def _active(layer: Any) -> _Choice:
    active = layer._active_adapter
    names = (active,) if isinstance(active, str) else tuple(active)
    return ((), False) if layer._disable_adapters else (names, True)


def _fault(drafter: Any, chosen: Sequence[Any]) -> str:
    """Why there can be no view in which the adapters of the layers `chosen` are chosen; "" if there can."""
    merged = sorted({name for layer in chosen for name in getattr(layer, "merged_adapters", ())})
    if merged:
        return f"{', '.join(merged)} is merged into the weights, where it stays in use: unmerge it first"
    for each in _modules(drafter):
        if any(vars(each).get(name) is not None for name in ("forward", "_compiled_call_impl")):
            return f"the forward of a {type(each).__name__} has been replaced, as by offloading: load it without that"
    return ""


@dataclass(frozen=True)
class _View:
    """A copy of a drafter, and what it was made of, without a reference to the drafter."""

    drafter: Any
    before: Sequence[tuple[Any, dict[str, Any]]]  # modules, None for the drafter itself, and their attributes then

    @classmethod
    def of(cls, drafter: Any, choices: Mapping[Any, _Choice]) -> _View:
        """`choices` maps layers to the adapters that they use."""
        made: dict[int, Any] = {}
        before: list[tuple[Any, dict[str, Any]]] = []

        def copied(part: Any) -> Any:
            if type(part) in (list, tuple):
                parts = [copied(each) for each in part]
                return type(part)(parts) if any(map(_differ, parts, part)) else part
            if part is not drafter and not isinstance(part, nn.Module):
                return part
            if id(part) not in made:
                made[id(part)] = part
                own = _attributes(part)
                before.append((None if part is drafter else part, own))
                new = {name: other for name, value in own.items() if (other := copied(value)) is not value}
                if isinstance(part, nn.Module) and part in choices:
                    names, used = choices[part]
                    new |= {"_active_adapter": list(names), "_disable_adapters": not used}
                made[id(part)] = _copy(part, new) if new else part
            return made[id(part)]

        return cls(copied(drafter), before)

    def is_of(self, drafter: Any) -> bool:
        """Whether a drafter is still what this view was made of, except for its choice of adapters."""
        return all(_are_same(before, _attributes(drafter if part is None else part)) for part, before in self.before)


_CHOICE = ("_active_adapter", "_disable_adapters", "_modules")


def _attributes(part: Any) -> dict[str, Any]:
    """Attributes and child modules of a drafter or module, without the choice of adapters."""
    own = vars(part)
    return {**{name: value for name, value in own.items() if name not in _CHOICE}, **own.get("_modules", {})}


def _copy(part: Any, new: Mapping[str, Any]) -> Any:
    """A shallow copy of a drafter or module, with new attributes and child modules."""
    other, children = object.__new__(type(part)), vars(part).get("_modules", {})
    vars(other).update(vars(part))
    vars(other).update({name: value for name, value in new.items() if name not in children})
    if children:
        vars(other)["_modules"] = {name: new.get(name, child) for name, child in children.items()}
    return other


def _are_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return one.keys() == other.keys() and not any(_differ(value, other[name]) for name, value in one.items())


def _differ(one: Any, other: Any) -> bool:
    return one is not other


_views: weakref.WeakKeyDictionary[Any, dict[tuple[_Choice, ...], _View]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()
