"""The error raised when a call cannot be drafted."""

from __future__ import annotations


class DraftingRefused(ValueError):
    """Raised when a call cannot be drafted, although plain decoding may run it. The message says why and what to do.

    It is raised before any text is streamed, any token is drawn and any logits processor is called, and the cache is as
    it was given. The exception is a target that turns out to read no drafts; see `speculative_decoding`.
    """

    PLAINLY = "leave assistant_model out"  # how messages say that a call may be decoded without a drafter

    def of_attached(self) -> str:
        """Returns the message for a model with an attached drafter, whose calls have no `assistant_model`."""
        return str(self).replace(self.PLAINLY, "detach the drafter by detach(model)")
