"""Adapters of a drafter (LoRA and others of PEFT): chosen by name for one call, and trained.

PEFT keeps the choice of an adapter on the layers, where another thread may change it during a call. So a call drafts by
a *view* of the drafter: copies of the modules that hold adapters and of the modules above them, with the choice of this
call. All weights are shared. A view is kept while its drafter is unchanged, as memories and measurements belong to it.
"""

from __future__ import annotations

import copy
import operator
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from transformers.utils import find_adapter_config_file

from ..core.checks import demand
from ..core.forks import new_lock
from ..core.refusals import DraftingRefused
from .published.target_copies import shallow_copy, why_not_copied, with_modules

_Choice = tuple[tuple[str, ...], bool]  # active adapters of a layer, and whether it uses them


def adapter_names(drafter: Any) -> list[str]:
    """Returns the names of the adapters that a drafter holds, sorted."""
    return sorted({name for layer in _layers(_root(drafter)).values() for name in layer._get_available_adapters()})


def check_adapter_name(drafter: Any, name: Any) -> None:
    """Raises a ValueError unless a drafter holds an adapter of this name."""
    known, wanted = adapter_names(drafter), "None or '', as this drafter holds no adapters"
    if known:
        wanted = f"None for the active adapters, '' for none, or one of {', '.join(map(repr, known))}"
    elif loads := _loads_adapters(drafter):
        wanted += f"; {loads}(folder, adapter_name=...) loads one"
    demand(name in known, "adapter_name", name, f"expected {wanted}")


def _loads_adapters(drafter: Any) -> str:
    """The method that loads adapters into a drafter; "" if there is none."""
    places = {"drafter": drafter, "drafter.model": getattr(drafter, "model", None)}
    return next((f"{name}.load_adapter" for name, each in places.items() if hasattr(each, "load_adapter")), "")


def adapted(drafter: Any, name: str | None = None) -> Any:
    """Returns a view of a drafter whose choice of adapters cannot change, or the drafter itself if it holds none.

    Args:
        drafter: a `Drafter`, also one that holds others.
        name: of its adapter to use; "" for none, None for those that are active now.

    Raises a DraftingRefused if a name is given and adapters are merged into the weights, or modules cannot be copied.
    """
    root = _root(drafter)
    layers = _layers(root)
    if not layers:
        return drafter
    given = (name,) if name else (), bool(name)
    choices = {place: _active(layer) if name is None else given for place, layer in layers.items()}
    if fault := _fault(root, layers.values() if name is not None else ()):
        if name is None:
            return drafter
        raise DraftingRefused(f"adapter_name={name!r} cannot be used with this drafter: {fault}")
    key, now = tuple(choices.values()), _contents(drafter, root)
    with _lock:
        before, views = _views.get(drafter, ([], {}))
        if len(before) != len(now) or any(map(operator.is_not, before, now)):
            _, views = _views[drafter] = now, {}
        if key not in views:
            views[key] = _view(drafter, root, choices)
        view = views[key]
        view.generation_config = drafter.generation_config
        return view


def in_subfolder(place: str, name: str, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of `load_adapter`, with the subfolder of an adapter's name where a repository has one."""
    hub = dict(kwargs.get("adapter_kwargs") or {})
    if "subfolder" in hub:
        return dict(kwargs)
    local = bool(kwargs.get("local_files_only") or hub.get("local_files_only"))
    known = {each: hub[each] for each in ("cache_dir", "revision", "token") if each in hub}
    found = find_adapter_config_file(place, local_files_only=local, **known, subfolder=name)
    return {**kwargs, "adapter_kwargs": hub | {"subfolder": name}} if found else dict(kwargs)


def with_lora(drafter: Any, rank: int, name: str | None = None) -> Any:
    """Returns a PEFT model that trains low-rank updates of all linear layers of a drafter, and nothing else.

    The updates are scaled by 2 (`lora_alpha = 2 * rank`). The model's `save_pretrained` writes an adapter of this
    `name` ("default"), which `drafter.load_adapter(folder)` puts on the base drafter.

    Raises:
        ImportError: peft is missing.
        ValueError: the rank is below 1.
    """
    if rank < 1:
        raise ValueError(f"lora rank {rank} is invalid: expected 1 or more")
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ImportError("LoRA needs peft: pip install -e '.[train]' in a checkout") from error
    names = sorted({name for name, module in drafter.named_modules() if isinstance(module, nn.Linear)})
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=names, bias="none")
    return get_peft_model(drafter, config, adapter_name=name or "default")


def _root(drafter: Any) -> nn.Module:
    """A drafter, or a module of those that it holds."""
    if isinstance(drafter, nn.Module):
        return drafter
    root = nn.Module()
    root._modules.update({name: each for name, each in vars(drafter).items() if isinstance(each, nn.Module)})
    return root


def _layers(root: nn.Module) -> dict[str, Any]:
    """The modules to which PEFT has added adapters, by each of their names."""
    named = root.named_modules(remove_duplicate=False)
    return {name: each for name, each in named if hasattr(each, "_active_adapter")}


def _active(layer: Any) -> _Choice:
    active = layer._active_adapter
    names = (active,) if isinstance(active, str) else tuple(active)
    return ((), False) if layer._disable_adapters else (names, True)


def _fault(root: nn.Module, chosen: Iterable[Any]) -> str:
    """Why there can be no view in which the adapters of the layers `chosen` are chosen; "" if there can."""
    merged = sorted({name for layer in chosen for name in getattr(layer, "merged_adapters", ())})
    if merged:
        return f"{', '.join(merged)} is merged into the weights, where it stays in use: unmerge it first"
    return why_not_copied(root.modules())


def _view(drafter: Any, root: nn.Module, choices: Mapping[str, _Choice]) -> Any:
    """A copy of a drafter in which layers use the adapters that `choices` names for them."""
    layers = {name: shallow_copy(root.get_submodule(name)) for name in choices}
    for name, (names, used) in choices.items():
        vars(layers[name]).update(_active_adapter=list(names), _disable_adapters=not used)
    made = with_modules(root, layers)
    if root is drafter:
        return made
    view = copy.copy(drafter)
    vars(view).update(made._modules)
    return view


def _contents(drafter: Any, root: nn.Module) -> list[Any]:
    """All modules of a drafter, their children and attributes, and its own but for options and choices of adapters."""
    found: list[Any] = []
    for part in (drafter, *(each for each in root.modules() if each is not root)):
        own = {name: value for name, value in vars(part).items() if name not in _CHOICE}
        if part is drafter:
            own.pop("generation_config", None)
        else:
            found.append(part)
        found += [*own.values(), *vars(part).get("_modules", {}).values()]
    return found


_CHOICE = ("_active_adapter", "_disable_adapters", "_modules")


# By drafter: its contents when its views were made, and these by their choices
_views: weakref.WeakKeyDictionary[Any, tuple[list[Any], dict[tuple[_Choice, ...], Any]]] = weakref.WeakKeyDictionary()
_lock = new_lock()
