"""Hidden-state speculative decoding for transformers: the same text, fewer target forwards.

Importing this package makes `model.generate(**inputs, assistant_model=drafter)` work with an [`HSDrafter`], a
[`CachebackDrafter`], a [`CausalLMDrafter`] or a [`CascadeDrafter`] of several. `attach(model, drafter)` lets all calls
of `model.generate()` draft, with nothing else changed.
"""

from typing import Any

from ._version import __version__
from .transformers_version import needs_newer, warn_if_untested

if needs_newer() is None:
    from .core.draft_tree import DraftTree
    from .drafters.base.auto_drafter import AutoDrafter
    from .drafters.base.registry import register_drafter
    from .drafters.block.configuration import BlockConfig
    from .drafters.block.drafter import BlockDrafter
    from .drafters.cascade.cascade_drafter import CascadeDrafter
    from .drafters.eagle.configuration_eagle import EagleConfig
    from .drafters.eagle.modeling_eagle import EagleDrafter
    from .drafters.hidden_state.candidate_generator import HSCandidateGenerator
    from .drafters.hidden_state.configuration_hsdraft import HSDraftConfig
    from .drafters.hidden_state.modeling_hsdraft import HSDrafter
    from .drafters.language_model.layer_skip import LayerSkipDrafter
    from .drafters.language_model.lm_drafter import CausalLMDrafter
    from .drafters.language_model.steered_lm import SteeredLMDrafter
    from .drafters.ngrams.cacheback import CachebackDrafter
    from .drafters.self_speculation.configuration_self import SelfDraftConfig
    from .drafters.self_speculation.modeling_self import SelfDrafter
    from .drafters.specformer.configuration_specformer import SpecFormerConfig
    from .drafters.specformer.modeling_specformer import SpecFormerDrafter
    from .engine.call_output import DraftStatistics, HSDraftEncoderDecoderOutput, HSDraftGenerateOutput
    from .engine.grammar_processor import GrammarProcessor
    from .engine.row_processors import register_form
    from .generate.attachment import Attachment, AttachmentStatistics, allow_attachments, attach, attached, detach
    from .generate.by_name import allow_names
    from .generate.generate_hook import install
    from .generate.hints import allow_hints
    from .remote.connecting import connect
    from .runtime.target_loading import load_target

    warn_if_untested()
    allow_names()
    install()
    allow_attachments()
    allow_hints()
    register_form(GrammarProcessor)
else:

    def __getattr__(name: str) -> Any:
        """Says why a name of the package is missing."""
        if name in __all__:
            raise ImportError(f"hf_hsdraft.{name} is not here: {needs_newer()}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "Attachment",
    "AttachmentStatistics",
    "AutoDrafter",
    "BlockConfig",
    "BlockDrafter",
    "CachebackDrafter",
    "CascadeDrafter",
    "CausalLMDrafter",
    "DraftStatistics",
    "DraftTree",
    "EagleConfig",
    "EagleDrafter",
    "HSCandidateGenerator",
    "HSDraftConfig",
    "HSDraftEncoderDecoderOutput",
    "HSDraftGenerateOutput",
    "HSDrafter",
    "LayerSkipDrafter",
    "SelfDraftConfig",
    "SelfDrafter",
    "SpecFormerConfig",
    "SpecFormerDrafter",
    "SteeredLMDrafter",
    "__version__",
    "attach",
    "attached",
    "connect",
    "detach",
    "load_target",
    "register_drafter",
]
