"""The error of a call that cannot be drafted for. All other errors are of another class."""

from __future__ import annotations


class DraftingRefused(ValueError):
    """The call cannot be drafted for, although plain decoding may run it. The message says why and what to do.

    It is raised before any text is streamed, any token is drawn and any logits processor is asked, and the cache of the
    call is as it was given. The exception is a target that turns out to read no drafts; see `speculative_decoding`.

    Attributes:
        PLAINLY: how messages say that a call may be decoded without a drafter.
    """

    PLAINLY = "leave assistant_model out"

    @classmethod
    def of_sharded(cls, drafting: str) -> DraftingRefused:
        """Returns the refusal of drafters that run parts of a target whose forwards take all processes at once.

        Args:
            drafting: what cannot draft.
        """
        return cls(
            f"{drafting} of a target that is sharded over processes cannot draft: its forwards take all of them at "
            f"once. To decode it plainly, {cls.PLAINLY}."
        )

    def of_attached(self) -> str:
        """Returns the message for a model with an attached drafter, whose calls have no `assistant_model`."""
        return str(self).replace(self.PLAINLY, "detach the drafter by detach(model)")
