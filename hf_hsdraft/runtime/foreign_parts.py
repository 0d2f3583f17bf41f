"""What no trial of a target can see: the user's code that may follow the text, its length, or the number of forwards.

So beside modules, hooks and functions of the user's, and adapters or experts that depend on how many tokens a forward
reads, nothing is drafted, except beside what was declared harmless.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
import types
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from torch import nn
from torch.nn.modules import module as of_all_modules
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

LIBRARIES = frozenset((
    "transformers", "torch", "peft", "accelerate", "trl", "deepspeed", "bitsandbytes", "liger_kernel", "torchao", "hqq",
    "optimum", "gptqmodel", "awq", "compressed_tensors", "flash_attn", "causal_conv1d", "mamba_ssm", "fla", "einops",
    "aqlm", "auto_round", "eetq", "fbgemm_gpu", "fouroversix", "fp_quant", "kernels", "quark", "sinq", "spqr_quant",
    "vptq", "safetensors", "tokenizers", "huggingface_hub", "numpy", __name__.partition(".")[0],
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
    reads, from a text's row in the batch, or from its length. Hooks that only record or count for you are the usual
    case.

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
            if (name := library_of(function)) not in _KNOWN and name not in _of_hub():
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


def _of_hub() -> set[str]:
    """The modules, of generated names, that `kernels` has loaded from the Hub, for `use_kernels` or an attention."""
    loaded: list[Any] = getattr(sys.modules.get("kernels"), "get_loaded_kernels", list)()
    return {each.module.__name__ for each in loaded if each.repo_info is not None}  # None: from a folder of the user's


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
_OF_DYNAMO = ("__compiled_fn_", "__resume_at_")  # names of what torch.compile adds to a module's globals
_NOT_RUN = ("__init__", "__new__", "__repr__", "__setstate__", "extra_repr", "reset_parameters")  # by forwards
_ROUTINES = frozenset({types.FunctionType, types.MethodType, functools.partial})
_HINT = "mark it with hf_hsdraft.harmless() if it does not"


def why_untriable(target: nn.Module, columns: int) -> str:
    """Why no trial can show that drafts are read rightly; empty if one can.

    `columns` is the greatest number of tokens that the target's forwards will read, in all rows.
    """
    kinds, configs, limited = dict[type[nn.Module], bool](), dict[int, Any](), dict[Any, bool]()
    name = type(target).__name__
    try:
        for name, part in target.named_modules():
            own, kind = vars(part), type(part)
            name = name or kind.__name__
            hooked = own["_forward_hooks"] or own["_forward_pre_hooks"] or "_hf_hook" in own
            if hooked and (why := next(_hooks(part), "")):
                return why
            if kind not in kinds:
                kinds[kind] = any(_code_of_user(kind))
            held = [key for key, each in own.items() if type(each) in _ROUTINES and is_foreign(each)]
            if kinds[kind] or held:
                reason = f"{name} ({kind.__name__}) is not transformers' own, and may depend on the text's length"
                marked = f"its {held[0]}" if held else "its forward"
                return f"{reason} or the number of forwards; mark {marked} with hf_hsdraft.harmless() if it does not"
            config = own.get("config")
            configs[id(config)] = config
            if (kind, id(config)) not in limited:
                names = itertools.chain(own, vars(config) if config is not None else ())
                limited[kind, id(config)] = any("capacity" in each for each in names)
            if limited[kind, id(config)] and (why := _capacity(part, config, columns)):
                return why
        name = type(target).__name__
        return next(_functions(target, kinds, configs.values()), "")
    except Exception as error:  # whatever objects of the user's raise
        return f"{name} cannot be looked into ({type(error).__name__})"


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


def _code_of_user(kind: type[nn.Module]) -> Iterator[bool]:
    """Whether functions of a module's classes are the user's. Of whole models only those that each forward runs."""
    for base in () if is_harmless(kind.forward) else kind.__mro__:
        for name, value in () if base in (nn.Module, object) else vars(base).items():
            runs = name in ("forward", "__call__") or not (name in _NOT_RUN or issubclass(kind, PreTrainedModel))
            yield runs and inspect.isroutine(value) and is_foreign(value)


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
