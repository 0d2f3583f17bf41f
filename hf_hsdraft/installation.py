"""What importing the package does to transformers: all methods of `GenerationMixin` that it wraps."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from .transformers_version import needs_newer, untested


def install() -> None:
    """Makes `generate()` draft, where transformers is new enough for it. Doing it again changes nothing.

    A transformers newer than the tests' newest gets a warning, or an ImportError if the hooks do not fit it.
    """
    if needs_newer() is not None:
        return
    with untested():
        from .batching.manager import init_continuous_batching
        from .drafters.hidden_state import modeling_hsdraft  # noqa: F401  # `AutoModel` knows it from here on
        from .generate import attachment, by_name, generate_hook

        hooks: list[tuple[str, Callable[..., Any]]] = [  # of one method, the later ones run first
            ("_extract_generation_mode_kwargs", by_name.extract_mode_kwargs),
            ("_prepare_generation_config", generate_hook.prepare_config),
            ("_validate_generation_mode", generate_hook.validate_mode),
            ("_validate_model_kwargs", generate_hook.validate_model_kwargs),
            ("_assisted_decoding", generate_hook.assisted_decoding),
            ("_sample", attachment.sample),
            *attachment.COUNTED,
            ("init_continuous_batching", init_continuous_batching),
        ]
        for name, function in hooks:
            _wrap(name, function)


def _wrap(name: str, function: Callable[..., Any]) -> None:
    """Puts a function in the place of a method, once. It is given the method that was there, and its arguments.

    Raises an ImportError if transformers has no such method, or one that does not take what the function takes.
    """
    from transformers.generation.utils import GenerationMixin

    original = getattr(GenerationMixin, name, None)
    if original is None:
        raise ImportError(f"GenerationMixin has no {name}")
    _, _, *own = inspect.signature(function).parameters.values()
    named = {each.name for each in own if each.kind is each.POSITIONAL_OR_KEYWORD}
    if missing := sorted(named - inspect.signature(original).parameters.keys()):
        raise ImportError(f"GenerationMixin.{name} takes no {', '.join(missing)}")
    before = getattr(original, "_hsdraft_functions", ())
    if function in before:
        return

    @functools.wraps(original)
    def method(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        return function(original, self, *args, **kwargs)

    method._hsdraft_functions = (*before, function)  # type: ignore[attr-defined]
    setattr(GenerationMixin, name, method)
