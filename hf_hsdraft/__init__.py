"""Hidden-state speculative decoding for transformers: the same text, fewer target forwards.

Importing this package makes `model.generate(**inputs, assistant_model=drafter)` work with an [`HSDrafter`] or a
[`CachebackDrafter`].
"""

from transformers import AutoConfig, AutoModel

from ._version import __version__
from .drafters.hidden_state.candidate_generator import HSCandidateGenerator
from .drafters.hidden_state.configuration_hsdraft import HSDraftConfig
from .drafters.hidden_state.modeling_hsdraft import HSDrafter
from .drafters.ngrams.cacheback import CachebackDrafter
from .engine.call_output import DraftStatistics, HSDraftEncoderDecoderOutput, HSDraftGenerateOutput
from .generate_hook import install
from .repository.care import register_care
from .repository.package_care import PackageCare
from .trees.draft_tree import DraftTree

install()
register_care(PackageCare())
AutoConfig.register(HSDraftConfig.model_type, HSDraftConfig)
AutoModel.register(HSDraftConfig, HSDrafter)

__all__ = [
    "CachebackDrafter",
    "DraftStatistics",
    "DraftTree",
    "HSCandidateGenerator",
    "HSDraftConfig",
    "HSDraftEncoderDecoderOutput",
    "HSDraftGenerateOutput",
    "HSDrafter",
    "__version__",
]
