"""What importing the package does to transformers."""

from __future__ import annotations

from .transformers_version import needs_newer, warn_if_untested


def install() -> None:
    """Makes `generate()` draft, where transformers is new enough for it. Doing it again changes nothing."""
    if needs_newer() is not None:
        return
    from .batching.generate_batch import allow_batches
    from .drafters.hidden_state import modeling_hsdraft  # noqa: F401  # `AutoModel` knows it from here on
    from .generate.attachment import allow_attachments
    from .generate.by_name import allow_names
    from .generate.generate_hook import install as hook_generate

    warn_if_untested()
    allow_names()
    hook_generate()
    allow_attachments()
    allow_batches()
