"""What runs in place of a module's hooks and forward within a context, in this thread; nothing stays on the module."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Protocol

from torch import nn
from torch.nn.modules import module as _of_all_modules

from .forks import new_rlock


class StandIn(Protocol):
    def run(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call's output, or `NotImplemented` where the module has to run itself."""
        ...


in_use: ContextVar[Mapping[nn.Module, StandIn]] = ContextVar("hsdraft_stand_ins", default={})  # noqa: B039 not written


@contextlib.contextmanager
def standing_in(stand_ins: Mapping[Any, StandIn], later: Collection[Any] = ()) -> Iterator[Callable[[], None]]:
    """Within, in this thread, each stand-in takes its module's calls, unless hooks of all modules would miss them.

    Calls of the modules in `later` are taken once what this yields was called: they are rarely called themselves.
    """
    if _of_all_modules._global_forward_hooks or _of_all_modules._global_forward_pre_hooks:
        yield lambda: None
        return
    before = in_use.get()
    placed, token = list[Placed](), in_use.set({**before, **stand_ins} if before else stand_ins)
    now = stand_ins.keys() - later if later else set(stand_ins)

    def place_rest() -> None:
        rest = [module for module in stand_ins if module not in now] if len(now) < len(stand_ins) else []
        now.update(rest)
        _place(rest, placed)

    try:
        _place(now, placed)
        yield place_rest
    finally:
        in_use.reset(token)  # first: if interrupted, what remains calls the module itself
        _remove(placed)


# torch calls this attribute instead of a module's hooks and forward, as `Module.compile` uses it. Copies of a module,
# in memory or stored, lack it, and no `forward` is touched.
_PLACE = "_compiled_call_impl"
_placing = new_rlock()


class Placed:
    """A module's call while any thread has a stand-in for it, in that thread and in others; `users` counts them."""

    def __init__(self, module: nn.Module) -> None:
        self._module: Any = module
        self.users = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        stand_in = in_use.get().get(self._module)
        output = NotImplemented if stand_in is None else stand_in.run(self._module, args, kwargs)
        return self._module._call_impl(*args, **kwargs) if output is NotImplemented else output


def _place(modules: Iterable[nn.Module], placed: list[Placed]) -> None:
    """Puts a `Placed` before each module that is not compiled, and appends it to `placed`."""
    with _placing:
        for module in modules:
            call = vars(module).get(_PLACE) or Placed(module)
            if isinstance(call, Placed):
                vars(module)[_PLACE] = call
                call.users += 1
                placed.append(call)


def _remove(placed: Sequence[Placed]) -> None:
    """Removes each `Placed` that no other thread needs."""
    with _placing:
        for call in placed:
            call.users -= 1
            if not call.users and vars(call._module).get(_PLACE) is call:
                del vars(call._module)[_PLACE]


def is_compiled(module: nn.Module) -> bool:
    """Whether something else than a stand-in takes a module's calls."""
    by_others = module._compiled_call_impl is not None and not isinstance(module._compiled_call_impl, Placed)
    return by_others or hasattr(module.forward, "_torchdynamo_orig_callable")
