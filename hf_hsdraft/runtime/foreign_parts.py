"""What no trial of a target can see: the user's code that may follow the text, its length, or the number of forwards.

Layers that map hidden states can be tried, unless they keep state (`Watch`). Inputs derived from the whole text, parts
that are given positions, hooks, and adapters or experts that depend on how many tokens a forward reads cannot.
"""

from __future__ import annotations

import array
import collections
import functools
import inspect
import itertools
import random
import re
import sys
import types
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn
from torch.nn.modules import module as of_all_modules
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .module_hooks import experience_of, fingerprint

LIBRARIES = frozenset((
    "transformers", "torch", "peft", "accelerate", "trl", "deepspeed", "bitsandbytes", "liger_kernel", "torchao", "hqq",
    "optimum", "gptqmodel", "awq", "compressed_tensors", "flash_attn", "causal_conv1d", "mamba_ssm", "fla", "einops",
    "safetensors", "tokenizers", "huggingface_hub", "numpy", __name__.partition(".")[0],
))  # fmt: skip
# What modelling modules import of Python itself. Not all of it: `unittest` makes functions that do anything.
_KNOWN = LIBRARIES | frozenset((
    "builtins", "abc", "collections", "contextlib", "copy", "dataclasses", "enum", "functools", "itertools", "math",
    "operator", "types", "typing", "typing_extensions", "warnings",
))  # fmt: skip
_harmless: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_Function = TypeVar("_Function")


def harmless(function: _Function) -> _Function:
    """Declares that drafting does no harm beside a function of yours, and returns it; works as a decorator.

    A drafted call makes fewer forwards of the target than a plain one, over several tokens each. Beside your own
    forward hooks, forwards and attention functions nothing is drafted, as they may depend on that. Declare those that
    do not: whose effect on a token does not follow from the number of forwards, from how many tokens a forward
    reads, or from the text's length. Hooks that only record or count for you are the usual case.

        model.register_forward_hook(hf_hsdraft.harmless(lambda *_: calls.append(1)))

    Args:
        function: a function, a method, a `functools.partial` or a callable object. For a method, the declaration is for
            all objects of its class.

    Raises a TypeError: it cannot be remembered, as it has no weak references; wrap it in a function.
    """
    code = getattr(function, "__func__", function)
    try:
        _harmless[id(code)] = code
    except TypeError:
        raise TypeError(f"{function!r} cannot be declared harmless: expected a function. Wrap it in one.") from None
    return function


def is_harmless(function: Any) -> bool:
    """Whether a function was declared harmless itself."""
    code = getattr(function, "__func__", function)
    return _harmless.get(id(code)) is code


def any_harmless() -> bool:
    """Whether any function was declared harmless."""
    return bool(_harmless)


def is_foreign(function: Any) -> bool:
    """Whether a function, or one that it wraps, is not a known library's, and was not declared harmless."""
    try:
        while function is not None:
            if is_harmless(function):
                return False
            function = getattr(function, "__func__", function)
            if isinstance(function, functools.partial):
                function = function.func
                continue
            if library_of(function) not in _KNOWN:
                return True
            function = getattr(function, "__wrapped__", None)
    except Exception:  # an object of the user's that answers strangely
        return True
    return False


def library_of(function: Any) -> str:
    space = getattr(function, "__globals__", None)
    if space is not None:  # not `__module__`, which `functools.wraps` copies
        name = space.get("__name__")
    elif type(function) is type(len):
        name = function.__module__ or "builtins"
    else:
        name = type(function).__module__
    return (name or "").partition(".")[0]


_OF_TEXT = (
    "prepare_inputs_for_generation",
    "_update_model_kwargs_for_generation",
    "_prepare_position_ids_for_generation",
    "_prefill",
    "create_masks_for_generate",
)
_OF_ALL_MODELS = (
    "torch.nn.functional",
    "transformers.cache_utils",
    "transformers.integrations.sdpa_attention",
    "transformers.masking_utils",
)
# Names of parts, and of what they are given, by which these know where a token stands.
_PLACES = re.compile(r"posit|rotary|rope|alibi", re.IGNORECASE)
_PLACED = re.compile(
    r"posit|cache|past|mask|rotary|rope|alibi|freq|seq|(^|_)(pos|cos|sin|len|length|start|step|offset)(_|$)"
)
_OF_DYNAMO = ("__compiled_fn_", "__resume_at_")  # names of what torch.compile adds to a module's globals
_MAPS = nn.Linear | nn.Embedding | nn.LayerNorm | nn.RMSNorm  # a state, whatever more its forward would take
_NOT_RUN = ("__init__", "__new__", "__repr__", "__setstate__", "extra_repr", "reset_parameters")  # by forwards
_ROUTINES = frozenset({types.FunctionType, types.MethodType, functools.partial})
_HINT = "mark it with hf_hsdraft.harmless() if it does not"


def look_at(target: nn.Module, columns: int) -> tuple[str, dict[str, nn.Module]]:
    """Looks for the user's code in a target whose forwards will read up to so many tokens, in all rows.

    Returns why no trial can show that drafts are read rightly, empty if one can; and the user's modules that map states
    alone, by name.
    """
    kinds, configs, limited = dict[type[nn.Module], list[Any]](), dict[int, Any](), dict[Any, bool]()
    mapping, name = dict[str, nn.Module](), type(target).__name__
    try:
        for name, part in target.named_modules():
            own, kind = vars(part), type(part)
            name = name or kind.__name__
            hooked = own["_forward_hooks"] or own["_forward_pre_hooks"] or "_hf_hook" in own
            if hooked and (why := next(_hooks(part), "")):
                return why, {}
            if kind not in kinds:
                kinds[kind] = list(_code_of_user(kind))
            code = kinds[kind]
            if not _ROUTINES.isdisjoint(map(type, own.values())):
                code = [*code, *(each for each in own.values() if type(each) in _ROUTINES and is_foreign(each))]
            if code:
                if _is_placed(name, part):
                    reason = f"{name} ({kind.__name__}) is not transformers' own, and may change at some position"
                    return f"{reason}; mark its forward with hf_hsdraft.harmless() if it does not", {}
                mapping[name] = part
            config = own.get("config")
            configs[id(config)] = config
            if (kind, id(config)) not in limited:
                names = itertools.chain(own, vars(config) if config is not None else ())
                limited[kind, id(config)] = any("capacity" in each for each in names)
            if limited[kind, id(config)] and (why := _capacity(part, config, columns)):
                return why, {}
        name = type(target).__name__
        return next(_functions(target, kinds, configs.values()), ""), mapping
    except Exception as error:  # whatever objects of the user's raise
        return f"{name} cannot be looked into ({type(error).__name__})", {}


def _hooks(part: nn.Module) -> Iterator[str]:
    """Why hooks around a module's forward, accelerate's among them, do not allow a trial."""
    accelerate = vars(part).get("_hf_hook")
    own = tuple(part._forward_pre_hooks.values()), tuple(part._forward_hooks.values())
    for hook in (*own[0], *own[1], *getattr(accelerate, "hooks", [accelerate])):
        if isinstance(hook, functools.partial) and hook.keywords.get("alora_offsets") is not None:
            yield "its adapter applies to the last tokens of a forward (activated LoRA), however many it reads"
        elif hook is not None and is_foreign(hook):
            yield _reason_of_hook(hook)


def _reason_of_hook(hook: Any) -> str:
    while isinstance(hook, functools.partial):
        hook = hook.func
    name = getattr(hook, "__qualname__", type(hook).__name__)
    return f"the forward hook {name} may depend on the number of forwards, or of tokens in each; {_HINT}"


def _code_of_user(kind: type[nn.Module]) -> Iterator[Any]:
    """The functions of a module's classes that are the user's. Of whole models only those that each forward runs."""
    for base in () if is_harmless(kind.forward) else kind.__mro__:
        for name, value in () if base in (nn.Module, object) else vars(base).items():
            runs = name in ("forward", "__call__") or not (name in _NOT_RUN or issubclass(kind, PreTrainedModel))
            if runs and inspect.isroutine(value) and is_foreign(value):
                yield value


def _is_placed(name: str, part: nn.Module) -> bool:
    """Whether a part is given where its tokens stand, or is named so."""
    if _PLACES.search(type(part).__name__) or _PLACES.search(name.rpartition(".")[2]):
        return True
    forwards = [vars(part).get("forward"), *(vars(base).get("forward") for base in type(part).__mro__)]
    for forward in filter(None, forwards):
        given = inspect.signature(forward).parameters
        if any(map(_PLACED.search, given)):
            return True
        anything = any(each.kind in (each.VAR_KEYWORD, each.VAR_POSITIONAL) for each in given.values())
        if not anything and (is_foreign(forward) or isinstance(part, _MAPS) or library_of(forward) == "transformers"):
            return False
    return True


def _capacity(part: nn.Module, config: Any, columns: int) -> str:
    """Experts that drop tokens beyond a number in a forward, where drafts of so many columns may reach it."""
    named = [(vars(each), name) for each in (config, part) if each is not None for name in vars(each)]
    limits = {name: values[name] for values, name in named if "capacity" in name}
    limits = {name: value for name, value in limits.items() if type(value) in (int, float)}
    # As many as the forward's tokens, whatever else is set.
    if not part.training and any("fraction" in name and value >= 1.0 for name, value in limits.items()):
        return ""
    for name, value in limits.items():
        if not isinstance(value, int) or value < columns:
            return f"its experts drop tokens beyond a capacity of each forward ({name}={value})"
    return ""


def _functions(target: nn.Module, kinds: Iterable[type], configs: Iterable[Any]) -> Iterator[str]:
    """Why functions and methods outside of the parts' classes do not allow a trial."""
    of_all = of_all_modules._global_forward_hooks, of_all_modules._global_forward_pre_hooks
    yield from (
        _reason_of_hook(hook) for hook in itertools.chain(*(each.values() for each in of_all)) if is_foreign(hook)
    )
    for name in _OF_TEXT:
        if is_foreign(vars(target).get(name) or getattr(type(target), name, None)):
            yield f"its {name} is not transformers' own, and may follow from the whole text"
    for name in sorted({str(getattr(config, "_attn_implementation", None)) for config in configs}):
        for what, registered in (("mask", ALL_MASK_ATTENTION_FUNCTIONS), ("attention", ALL_ATTENTION_FUNCTIONS)):
            if is_foreign(registered.get(name)):
                yield f"the {what} function registered for {name!r} is not transformers' own; {_HINT}"
    spaces = {base.__module__ for kind in kinds for base in kind.__mro__}
    spaces = {space for space in spaces if space.startswith("transformers.models.")} | {*_OF_ALL_MODELS}
    for space, holder in [*((space, sys.modules[space]) for space in sorted(spaces)), ("torch.nn.Module", nn.Module)]:
        own = vars(holder)
        for name, value in list(own.items()):
            if not callable(value) or isinstance(value, type) or getattr(value, "__globals__", None) is own:
                continue
            if name.startswith(_OF_DYNAMO):
                continue
            if is_foreign(value):
                yield f"{space}.{name} was replaced, and may follow from the text's length; {_HINT}"


_CONTAINERS = (list, tuple, set, frozenset, dict, collections.deque)
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_SHOWN = (itertools.count, itertools.cycle, itertools.repeat, bytearray, array.array)
_OBJECTS = Cache | CacheLayerMixin | PreTrainedConfig  # a library's, in which code of the user's may keep something
_LEAVES = LIBRARIES | {"logging"}
_WEIGHTS = {"_parameters", "_buffers", "_modules"}
_OF_MODULES = frozenset(vars(nn.Module()))
_MOST_NUMBERS = 2**12  # of a tensor that is compared by them
_MOST_OBJECTS = 20_000


class Watch:
    """Compares what the user's modules of a target hold with what they held at the beginning of a call.

    What depends on such state follows from how many forwards there were: drafting makes fewer than plain decoding, and
    trials make more. Some modules change only in single steps, which a trial would run too often. So the first call of
    a target with modules of the user's drafts nothing, and shows whether they change.
    """

    def __init__(self, target: nn.Module, parts: Mapping[str, nn.Module]) -> None:
        self._target, self._parts = target, parts
        self._held = _held_by(parts) if parts else {}

    def changed(self) -> str:
        """The name of something that has changed since the call began; empty if nothing has."""
        now = _held_by(self._parts) if self._parts else {}
        pairs = ((name, own, now.get(key)) for key, (name, own, _) in self._held.items())
        return next((name for name, own, later in pairs if later is None or later[1] != own), "")

    def why_not(self) -> str:
        """Why nothing may be drafted, after the prompts' forward; empty if something may."""
        if changed := self.changed():
            return f"{changed} changes in forwards, and a draft makes fewer of them"
        if self._parts and fingerprint(self._target) not in experience_of(self._target).steady:
            name = next(iter(self._parts))
            return (
                f"{name} is not transformers' own, and is watched in this call for what it changes; later calls draft, "
                "or mark its forward with hf_hsdraft.harmless()"
            )
        return ""

    def end(self, forwards: int) -> None:
        """After a call of so many forwards: later ones may draft, unless something has changed."""
        if self._parts and forwards > 1:
            steady, form, changed = experience_of(self._target).steady, fingerprint(self._target), self.changed()
            if len(steady) > 64:  # of a target that changes from call to call
                steady.clear()
            (steady.discard if changed else steady.add)(form)


def _held_by(parts: Mapping[str, nn.Module]) -> dict[int, tuple[str, Any, Any]]:
    """All that modules have at hand: by id of each object its name, what it contains, and itself."""
    found, waiting, roots = dict[int, tuple[str, Any, Any]](), [*parts.items()], {id(part) for part in parts.values()}
    while waiting and len(found) < _MOST_OBJECTS:
        name, value = waiting.pop()
        if id(value) in found:
            continue
        try:
            held = list(_items(value, id(value) in roots))
            plain = [(key, repr(each)) if isinstance(each, _PLAIN) else (key, id(each)) for key, each in held]
            waiting += [(f"{name}.{key}", each) for key, each in held if not isinstance(each, _PLAIN)]
            contents: Any = _marks(value), plain
        except Exception:  # it cannot be compared
            contents = object()
        found[id(value)] = name, contents, value  # held, so that no other object takes its id
    if waiting:
        found[0] = waiting[0][0], object(), None
    return found


def _marks(value: Any) -> Any:
    """What an object contains that is not an object by itself."""
    if isinstance(value, torch.Tensor):
        small = type(value) in (torch.Tensor, nn.Parameter) and value.numel() <= _MOST_NUMBERS and not value.is_meta
        return None if value.is_inference() else value._version, repr(value.tolist()) if small else None
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, _SHOWN):
        return repr(value)
    return object() if isinstance(value, Iterator) else None


def _items(value: Any, is_part: bool) -> Iterator[tuple[str, Any]]:
    """What an object holds, with names; nothing of a known library's object."""
    if isinstance(value, Mapping):
        yield from ((f"{key!r:.20}", each) for key, each in list(value.items()))
        yield from (("key", key) for key in list(value))
    elif isinstance(value, _CONTAINERS):
        yield from ((str(index), each) for index, each in enumerate(list(value)))
    elif isinstance(value, types.MethodType):
        yield from (("function", value.__func__), ("self", value.__self__))
    elif isinstance(value, functools.partial):
        yield from (("function", value.func), ("arguments", value.args), ("keywords", value.keywords))
    elif isinstance(value, types.FunctionType):
        yield from _at_hand(value) if is_foreign(value) else ()
    elif isinstance(value, types.ModuleType):
        if _is_of_user(value.__name__):
            yield from ((key, each) for key, each in vars(value).items() if isinstance(each, (*_PLAIN, *_CONTAINERS)))
    elif isinstance(value, type):
        if _is_of_user(value.__module__):
            yield from ((key, each) for key, each in vars(value).items() if key == "__call__" or key[:2] != "__")
            yield from ((base.__name__, base) for base in value.__bases__)
    elif isinstance(value, nn.Module | _OBJECTS) or type(value).__module__.partition(".")[0] not in _LEAVES:
        yield type(value).__name__, type(value)
        hidden: Any = _OF_MODULES if isinstance(value, nn.Module) else ()
        if isinstance(value, nn.Module) and (is_part or _is_of_user(type(value).__module__)):
            hidden = _OF_MODULES - _WEIGHTS
        yield from ((key, each) for key, each in list(getattr(value, "__dict__", {}).items()) if key not in hidden)
        members = (member for base in type(value).__mro__ for member in vars(base).items())
        slots = [name for name, member in members if isinstance(member, types.MemberDescriptorType)]
        yield from ((name, getattr(value, name)) for name in slots if hasattr(value, name))


def _is_of_user(space: str) -> bool:
    return space.partition(".")[0] not in LIBRARIES | sys.stdlib_module_names


def _at_hand(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """What a function reads besides its arguments: its closure, defaults, and the globals that it names."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    yield from ((name, cell.cell_contents) for name, cell in cells if cell != types.CellType())
    yield from (("defaults", function.__defaults__), ("keywords", function.__kwdefaults__))
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        codes += [each for each in code.co_consts if isinstance(each, types.CodeType)]
        yield from ((name, function.__globals__[name]) for name in code.co_names if name in function.__globals__)
