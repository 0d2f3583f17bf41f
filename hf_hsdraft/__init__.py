"""Hidden-state speculative decoding for transformers: the same text, fewer target forwards.

Importing this package makes `model.generate(**inputs, assistant_model=drafter)` work with an [`HSDrafter`] or a
[`CachebackDrafter`].
"""

from transformers import AutoConfig, AutoModel

from ._version import __version__
from .cacheback import CachebackDrafter
from .call_output import DraftStatistics, HSDraftEncoderDecoderOutput, HSDraftGenerateOutput
from .candidate_generator import HSCandidateGenerator
from .configuration_hsdraft import HSDraftConfig
from .draft_tree import DraftTree
from .generate_hook import install
from .modeling_hsdraft import HSDrafter

install()
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
