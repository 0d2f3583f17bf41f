"""What no trial of a target can see: the user's code that may follow the text, its length, or the number of forwards.

A trial reads a few tokens at one place of the text. Layers that map hidden states can be tried so. Inputs derived from
the whole text, rotary embeddings and masks that change at some length, hooks that count forwards, and adapters or
experts that depend on how many tokens a forward reads cannot.
"""

from __future__ import annotations

import dis
import functools
import inspect
import itertools
import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as of_all_modules
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .foreign_code import is_foreign
from .foreign_state import State, stored_and_read
from .recording_hooks import only_records

_OF_TEXT = (
    "prepare_inputs_for_generation",
    "_update_model_kwargs_for_generation",
    "_prepare_position_ids_for_generation",
    "_prefill",
    "create_masks_for_generate",
)
_POSITIONAL = re.compile(r"rotary|rope|posit|alibi", re.IGNORECASE)
_SEES_POSITIONS = frozenset(
    ("position_ids", "positions", "seq_len", "cache_position", "cache", "past_key_value", "past_key_values")
)
_CHANGES = "{name} is not transformers' own, and changes {what} in each forward; a draft makes fewer of them"
_CAPACITY = re.compile("capacity")


def why_untriable(target: nn.Module, columns: int) -> str:
    """Why no trial can show that drafts of so many tokens in all rows are read rightly; empty if one can."""
    checks = (_inputs_of_text, _attention, _places, _hooks, _stores)
    return next(filter(None, (check(target) for check in checks)), "") or _capacity(target, columns)


def _inputs_of_text(target: nn.Module) -> str:
    for name in _OF_TEXT:
        method = vars(target).get(name) or getattr(type(target), name, None)
        if method is not None and is_foreign(method):
            return f"its {name} is not transformers' own, and may follow from the whole text"
    return ""


def _attention(target: nn.Module) -> str:
    configs = {id(config): config for part in target.modules() if (config := vars(part).get("config")) is not None}
    names = sorted({str(getattr(config, "_attn_implementation", None)) for config in configs.values()})
    for name in names:
        if is_foreign(ALL_MASK_ATTENTION_FUNCTIONS.get(name)):
            return f"the mask function registered for {name!r} is not transformers' own, and may follow from the length"
        if is_foreign(ALL_ATTENTION_FUNCTIONS.get(name)):
            return f"the attention registered for {name!r} is not transformers' own, and may follow from the length"
    spaces = {type(part).__module__ for part in target.modules()}
    for module in sorted(space for space in spaces if space.startswith("transformers.")):
        for name, value in vars(sys.modules[module]).items():
            if "mask" in name and inspect.isfunction(value) and is_foreign(value):
                return f"{module}.{name} was replaced, and may follow from the length"
    return ""


def _places(target: nn.Module) -> str:
    """A rotary embedding, or another part that is given positions or the cache, of the user's own."""
    for name, part in target.named_modules():
        if isinstance(part, PreTrainedModel):
            continue
        kind, forward = type(part), vars(part).get("forward") or type(part).forward
        if _POSITIONAL.search(kind.__name__) or _POSITIONAL.search(name.rpartition(".")[2]):
            routines = (method for base in kind.__mro__ for method in vars(base).values())
            methods: list[Any] = [method for method in routines if inspect.isfunction(method)]
            methods += [value for value in vars(part).values() if inspect.isroutine(value)]
            foreign = any(map(is_foreign, (forward, *methods)))
        else:
            foreign = is_foreign(forward) and not _SEES_POSITIONS.isdisjoint(inspect.signature(forward).parameters)
        if foreign:
            return f"{name} ({kind.__name__}) is not transformers' own, and may change at some position"
    return ""


def _of_the_user(target: nn.Module) -> Iterator[tuple[str, nn.Module, Any]]:
    """Names, modules and forwards that are not known libraries'."""
    for name, part in target.named_modules():
        forward = vars(part).get("forward") or type(part).forward
        if is_foreign(forward):
            yield name, part, forward


def _stores(target: nn.Module) -> str:
    seen: set[Any] = set()
    for name, part, forward in _of_the_user(target):
        kind = type(part), getattr(forward, "__func__", forward)
        if kind not in seen and (stored := stored_and_read(type(part), forward)):
            return _CHANGES.format(name=name or type(part).__name__, what=stored)
        seen.add(kind)
    return ""


def state_of_the_user(target: nn.Module) -> State:
    """What the user's modules hold before the prompts are read; see `why_stateful`."""
    return State({name: part for name, part, _ in _of_the_user(target)})


def why_stateful(before: State) -> str:
    """Why no trial can show how drafts are read, after the prompts' forward; empty if it may."""
    changed = before.changed()
    return changed and _CHANGES.format(name="a module", what=changed)


def _hooks(target: nn.Module) -> str:
    for part in target.modules():
        own = itertools.chain(part._forward_pre_hooks.values(), part._forward_hooks.values())
        for hook in own:
            if isinstance(hook, functools.partial) and hook.keywords.get("alora_offsets") is not None:
                return "its adapter applies to the last tokens of a forward (activated LoRA), however many it reads"
            if _may_change(hook):
                return _counts(hook)
    of_all = of_all_modules._global_forward_hooks, of_all_modules._global_forward_pre_hooks
    return next((_counts(hook) for hooks in of_all for hook in hooks.values() if _may_change(hook)), "")


def _counts(hook: Any) -> str:
    name = getattr(hook, "__qualname__", type(hook).__name__)
    return (
        f"the forward hook {name} is given what passes through its modules, which it may change or count by forwards; "
        "a draft makes fewer of them"
    )


def _may_change(hook: Any) -> bool:
    """Whether a hook of the user's reads what it is given, or holds parts of a model, and may do more than record."""
    if not is_foreign(hook) or only_records(hook):
        return False
    functions = list(_functions_of(hook))
    return any(map(_reaches, functions)) or any(map(_is_of_a_model, _held(hook, functions)))


def _is_of_a_model(value: Any) -> bool:
    return isinstance(value, torch.Tensor | nn.Module | Cache)


def _held(hook: Any, functions: Iterable[Any]) -> Iterator[Any]:
    """What a hook has at hand besides what it is given: of its object, and of its module's globals."""
    owner = getattr(hook, "__self__", hook)
    yield from list(getattr(owner, "__dict__", {}).values())
    for function in functions:
        names = getattr(getattr(function, "__code__", None), "co_names", ())
        yield from (function.__globals__[name] for name in names if name in function.__globals__)


def _functions_of(hook: Any) -> Iterator[Any]:
    while isinstance(hook, functools.partial):
        yield hook
        hook = hook.func
    yield hook if hasattr(hook, "__code__") else type(hook).__call__


def _reaches(function: Any) -> bool:
    if isinstance(function, functools.partial):
        held = [*function.args, *function.keywords.values()]
        return any(isinstance(each, torch.Tensor | nn.Module | Cache) for each in held)
    code = getattr(function, "__code__", None)
    if code is None:
        return True
    count = code.co_argcount + code.co_kwonlyargcount
    count += bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    bound = inspect.ismethod(function) or function.__qualname__.endswith(".__call__")
    given = set(code.co_varnames[int(bound) : count])
    cells = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
    return not given.isdisjoint(_names_read(code)) or any(
        isinstance(each, torch.Tensor | nn.Module | Cache) for each in cells
    )


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _names_read(code: Any) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if instruction.opname.startswith(("LOAD_FAST", "LOAD_DEREF", "LOAD_CLOSURE", "STORE_FAST_LOAD_FAST")):
            yield from instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
    yield from code.co_cellvars


def _capacity(target: nn.Module, columns: int) -> str:
    """Experts that drop tokens beyond a number in a forward, where drafts of so many columns may reach it."""
    for part in target.modules():
        named = {**getattr(vars(part).get("config"), "__dict__", {}), **vars(part)}
        limits = {
            name: value
            for name, value in named.items()
            if _CAPACITY.search(name) and isinstance(value, int | float) and not isinstance(value, bool)
        }
        # As many as the forward's tokens, whatever else is set.
        if not part.training and any("fraction" in name and value >= 1.0 for name, value in limits.items()):
            continue
        for name, value in limits.items():
            if not isinstance(value, int) or value < columns:
                return f"its experts drop tokens beyond a capacity of each forward ({name}={value})"
    return ""
