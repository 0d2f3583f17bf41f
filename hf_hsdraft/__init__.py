"""Hidden-state speculative decoding for transformers: the same text, fewer target forwards.

Importing this package makes `model.generate(**inputs, assistant_model=drafter)` work with an [`HSDrafter`].
"""

from ._version import __version__
from .candidate_generator import HSCandidateGenerator
from .configuration_hsdraft import HSDraftConfig
from .decoding import DraftStatistics, HSDraftGenerateOutput
from .draft_tree import DraftTree
from .generate_hook import install
from .modeling_hsdraft import HSDrafter

install()

__all__ = [
    "DraftStatistics",
    "DraftTree",
    "HSCandidateGenerator",
    "HSDraftConfig",
    "HSDraftGenerateOutput",
    "HSDrafter",
    "__version__",
]
