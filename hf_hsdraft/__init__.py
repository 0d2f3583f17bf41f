"""Hidden-state speculative decoding for transformers: the same text, fewer target forwards.

Importing this package makes `model.generate(**inputs, assistant_model=drafter)` work with an [`HSDrafter`], a
[`CachebackDrafter`], a [`CausalLMDrafter`] or a [`CascadeDrafter`] of several. `attach(model, drafter)` lets all calls
of `model.generate()` draft, with nothing else changed.

The names of `__all__` are loaded on first use; `__init__.pyi` tells type checkers where they are.
"""

from __future__ import annotations

import importlib
from typing import Any

from ._version import __version__ as __version__
from .core.command import is_command
from .core.methods import load, offered

_MODULES = {
    "Attachment": "generate.attachment",
    "AutoDrafter": "drafters.base.auto_drafter",
    "CachebackDrafter": "drafters.lookup.cacheback",
    "DraftStatistics": "core.statistics",
    "DraftTree": "core.draft_tree",
    "HSCandidateGenerator": "drafters.hidden_state.candidate_generator",
    "HSDraftConfig": "drafters.hidden_state.configuration_hsdraft",
    "HSDraftEncoderDecoderOutput": "engine.call_output",
    "HSDraftGenerateOutput": "engine.call_output",
    "HSDrafter": "drafters.hidden_state.modeling_hsdraft",
    "attach": "generate.attachment",
    "attached": "generate.attachment",
    "connect": "remote.connecting",
    "detach": "generate.attachment",
    "FinishedText": "batching.requests",
    "generate_many": "batching.generate_many",
    "harmless": "runtime.foreign_parts",
    "load_target": "runtime.target_loading",
    "register_drafter": "drafters.base.registry",
}
_OF_METHODS = {
    "BlockConfig",
    "BlockDrafter",
    "CascadeDrafter",
    "CausalLMDrafter",
    "EagleConfig",
    "EagleDrafter",
    "HistoryContents",
    "LayerSkipDrafter",
    "MtpDrafter",
    "SelfDraftConfig",
    "SelfDrafter",
    "SpecFormerConfig",
    "SpecFormerDrafter",
    "SteeredLMDrafter",
    "UnoDrafter",
    "erase_history",
    "list_history",
}
__all__ = sorted(["__version__", *_MODULES, *offered("name")])


def __getattr__(name: str) -> Any:
    if name not in __all__ and name not in _OF_METHODS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .transformers_version import needs_newer

    if (why := needs_newer()) is not None:
        raise ImportError(f"hf_hsdraft.{name} is not here: {why}")
    if is_command():  # or a script of the same name
        _install()
    if name in _MODULES:
        module = importlib.import_module(f".{_MODULES[name]}", __name__)
    elif name in offered("name"):
        module = load("name", name)
    else:
        raise ImportError(
            f"hf_hsdraft.{name} is not here: it belongs to a method, and hf_hsdraft/methods has none of it"
        )
    globals()[name] = getattr(module, name)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _install() -> None:
    from .installation import install

    install()


if not is_command():  # which does it once it has parsed its options
    _install()
