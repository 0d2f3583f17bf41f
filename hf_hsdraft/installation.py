"""What importing the package does to transformers."""

from __future__ import annotations

from .transformers_version import needs_newer, untested


def install() -> None:
    """Makes `generate()` draft, where transformers is new enough for it. Doing it again changes nothing.

    A transformers newer than the tests' newest gets a warning, or an ImportError if the hooks do not fit it.
    """
    if needs_newer() is not None:
        return
    with untested():
        from .batching.generate_batch import allow_batches
        from .drafters.hidden_state import modeling_hsdraft  # noqa: F401  # `AutoModel` knows it from here on
        from .generate.attachment import allow_attachments
        from .generate.by_name import allow_names
        from .generate.generate_hook import install as hook_generate

        allow_names()
        hook_generate()
        allow_attachments()
        allow_batches()
