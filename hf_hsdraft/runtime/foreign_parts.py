"""What no trial of a target can see: the user's code that may follow the text, its length, or the number of forwards.

A trial reads a few tokens at one place of the text. Layers that map hidden states can be tried so, unless they keep
state (`foreign_state`). Inputs derived from the whole text, parts that are given positions, hooks that count
forwards, and adapters or experts that depend on how many tokens a forward reads cannot.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import re
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn
from torch.nn.modules import module as of_all_modules
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .foreign_code import is_foreign, is_harmless, library_of

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
