"""What libraries attach to a model's modules: hooks, replaced forwards and adapters.

Findings about a model are valid while its `fingerprint` is unchanged. `no_hooks_left` removes the hooks by which
transformers captures hidden states, which a forward leaves on the layers: a model that carries them cannot be pickled.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import sys
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules import module as of_all_modules
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import output_capturing

from ..core.forks import freed_in_children, new_lock
from ..core.kept import kept_with
from ..core.stand_ins import Placed
from .foreign_parts import is_harmless

_PACKAGE = __name__.partition(".")[0]


@dataclass
class Experience:
    """What calls have found out about a target; kept for as long as it lives."""

    # What it does with drafts, by kind of call; see `find_out`
    findings: dict[Any, list[Any]] = field(default_factory=dict)
    untried: int = 0  # tokens that calls might have emitted which were too short to win back its trial
    # Whether it has returned no cache. As it may keep states in its modules, later calls are refused before the
    # prompt.
    cacheless: bool = False
    drafters: dict[Any, Any] = field(default_factory=dict)  # those that calls named, by name
    programs: bool = False  # whether its layers ran as programs in the last round
    capturing: _Calls | None = None  # the drafted calls that run, and what was installed before them


def experience_of(target: Any) -> Experience:
    return kept_with(target, "experience", Experience)


def fingerprint(model: nn.Module) -> int:
    """A hash of hooks, replaced forwards, attention, adapters, module classes and weight dtypes.

    Hooks of transformers and of this package are ignored: they only keep outputs, and exist only within a call, which
    may be another thread's. The state of a hook is ignored too; a hook whose effect changes must be registered again.
    """
    parts: list[Any] = [*of_all_modules._global_forward_hooks, *of_all_modules._global_forward_pre_hooks]
    kinds, attentions = set(), set()
    for module in model.modules():
        own, kind = vars(module), type(module)
        kinds.add(kind)
        parts.append(kind)
        parts += ((type(weight), weight.dtype) for weight in own["_parameters"].values() if weight is not None)
        if own["_forward_hooks"] or own["_forward_pre_hooks"]:
            parts += (_hook(number, hook) for number, hook in foreign_hooks(module))
        replaced = (own.get("forward"), own.get("_compiled_call_impl"))
        parts += (_serial(each) for each in replaced if each is not None and not isinstance(each, Placed))
        if "_active_adapter" in own:  # of PEFT
            parts += (str(own["_active_adapter"]), own.get("_disable_adapters"), str(own.get("merged_adapters")))
        if (name := getattr(own.get("config"), "_attn_implementation", None)) is not None:
            attentions.add(name)
    parts.append(frozenset((kind, _serial(kind.forward)) for kind in kinds))
    parts.append(F.scaled_dot_product_attention is torch._C._nn.scaled_dot_product_attention)
    for name in sorted({kind.__module__ for kind in kinds}):  # functions there may be replaced at any time
        parts += (id(value) for value in vars(sys.modules.get(name, object)).values() if inspect.isfunction(value))
    parts.append(frozenset((str(name), _serial(ALL_ATTENTION_FUNCTIONS.get(name))) for name in attentions))
    return hash(tuple(parts))


def has_foreign_hooks(model: nn.Module) -> bool:
    """Whether hooks of other libraries, not declared harmless, observe or change what passes through its modules."""
    return any(not is_harmless(hook) for module in model.modules() for _, hook in foreign_hooks(module))


def foreign_hooks(module: nn.Module) -> Iterator[tuple[int, Any]]:
    """Hooks around a module's forward by other libraries, with their numbers, which are never reused."""
    for number, hook in itertools.chain(module._forward_pre_hooks.items(), module._forward_hooks.items()):
        if _library(hook) not in ("transformers", _PACKAGE):
            yield number, hook


def _hook(number: int, hook: Any) -> Any:
    """Identity of a hook: its number, except for hooks that PEFT registers in each call."""
    if isinstance(hook, functools.partial) and _library(hook.func) == "peft":
        return _serial(hook.func), str(hook.args), str(hook.keywords)
    return number


def _library(function: Any) -> str:
    return (getattr(function, "__module__", None) or "").partition(".")[0]


def _serial(function: Any) -> int:
    """A unique number for a function, not reused after the function is gone."""
    function = inspect.unwrap(function) if getattr(function, "_hsdraft", None) is not None else function
    try:
        return _serials.setdefault(function, next(_numbers))
    except TypeError:  # not hashable, or no weak references
        return id(function)


_numbers = itertools.count()
_serials: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


CAPTURES = "_output_capturing_hooks_installed"  # set by transformers on each model whose layers have the hooks
_Place = tuple[int, str | int]  # id of a module, and the flag or the key of one of its hooks


@dataclass
class _Calls:
    """Drafted calls of one target; what was installed `before` the first of them stays."""

    before: frozenset[_Place]
    running: int = 0


_lock = new_lock()
if hasattr(output_capturing, "_hook_installation_lock"):  # drafted calls install hooks far more often than others
    freed_in_children(output_capturing._hook_installation_lock)


@contextlib.contextmanager
def no_hooks_left(target: nn.Module) -> Iterator[None]:
    """Around a drafted call: removes its capturing hooks when the last call of the target ends.

    Hooks from before the call stay. If another thread is capturing outputs of the same modules at that moment, all
    hooks stay until the end of the next drafted call.
    """
    with _lock:
        known = experience_of(target)
        if (calls := known.capturing) is None:
            places = frozenset((id(module), where) for module, where in _installed(target))
            calls = known.capturing = _Calls(places)
        calls.running += 1
    try:
        yield
    finally:
        with _lock:
            calls.running -= 1
            if calls.running == 0 and _removed(target, calls.before):
                known.capturing = None


def _installed(target: nn.Module) -> Iterator[tuple[nn.Module, str | int]]:
    """Yields modules with the flag, and modules with capturing hooks with each hook's key."""
    for module in target.modules():
        if module.__dict__.get(CAPTURES):
            yield module, CAPTURES
        for key, hook in tuple(module._forward_hooks.items()):
            if getattr(hook, "__module__", None) == output_capturing.__name__:
                yield module, key


def _removed(target: nn.Module, before: frozenset[_Place]) -> bool:
    """Removes what was not installed before; `False`, with nothing changed, while another thread needs it."""
    # A thread that starts capturing now finds no flag, and waits for this lock to install its hooks.
    with getattr(output_capturing, "_hook_installation_lock", contextlib.nullcontext()):
        new = [(module, where) for module, where in _installed(target) if (id(module), where) not in before]
        flagged = [module for module, where in new if where == CAPTURES]
        for module in flagged:
            del module.__dict__[CAPTURES]
        # One that started earlier needs the hooks until its forward ends.
        captured = [part for model in _capturing_models() for part in model.modules()] if new else []
        if captured and not set(captured).isdisjoint(target.modules()):
            for module in flagged:
                module.__dict__[CAPTURES] = True
            return False
        for module, where in new:
            if isinstance(where, int):
                module._forward_hooks.pop(where, None)
    return True


def _capturing_models() -> Iterator[nn.Module]:
    """The models whose outputs are being captured, found in the stack frames of all threads."""
    for frame in sys._current_frames().values():
        each: FrameType | None = frame
        while each is not None:
            if each.f_globals.get("__name__") == output_capturing.__name__:
                names: dict[str, Any] = dict(each.f_locals)
                if names.get("collected_outputs") and isinstance(names.get("self"), nn.Module):
                    yield names["self"]
            each = each.f_back
