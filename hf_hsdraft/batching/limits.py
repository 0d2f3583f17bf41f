"""What a target does with the drafts of a running batch: the same trial as for single texts, whenever it is due."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from transformers.utils import logging

from ..drafters.base.draft_options import DraftOptions
from ..runtime.findings import Finding, Size, find_out
from ..runtime.target_limits import furthest_read, slots_read_alike
from ..runtime.target_runtime import TargetRuntime
from .text import Text

logger = logging.get_logger(__name__)


@dataclass
class _Positions:
    roots: list[int]  # position of each text's last token; 0 for places without a text


@dataclass
class BatchLimits:
    """What may be drafted for the texts of a batch; see `engine.draft_limits.DraftLimits`.

    Attributes:
        options: of each text, depth 0 where the target misreads drafts.
        kind: `"tree"` or `"chain"`, what is drafted.
        reason: why nothing is drafted; empty if something is.
        known_until: length of text up to which the target's ability is known.
        deepest: depth of drafts up to which it is known.
        ends: for each place, the furthest position to which a draft may reach.
        alike_until: first cache slot beyond those that the target reads alike.
    """

    options: DraftOptions
    rows: int
    kind: str = "tree"
    reason: str = ""
    known_until: int = 0
    deepest: int = sys.maxsize
    alike_until: int = sys.maxsize
    positions: _Positions = field(init=False)
    ends: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.positions, self.ends = _Positions([0] * self.rows), [0] * self.rows
        self._runtime: TargetRuntime | None = None
        self._texts: Mapping[int, Text] = {}
        self.kind = "tree" if self.options.beam_width > 1 else "chain"

    @property
    def size(self) -> Size:
        """The size of the drafts. A text that remains may have a whole tree."""
        options, shared = self.options, self.options.shared_by(self.rows)
        tokens = max(options.tree_size + 1, self.rows * (shared.tree_size + 1))
        return Size(shared.tree_size + 1, tokens, options.tree_size, options.as_chain().tree_size)

    def why_alone(self, text: Text) -> str:
        """Why a text whose prompt has been read cannot join; tries what is unknown. Empty if it can."""
        runtime = text.runtime
        assert runtime is not None
        if not runtime.rows_can_be_apart:
            return "its cache or its inputs are not known to have rows that can be told apart"
        if runtime.refusal is not None:
            return str(runtime.refusal)
        found = self._found(runtime, text.guessed, text.root, ragged=False)
        if found is None:
            return "it is too close to the last position that its target has"
        return "" if found.trees else found.reason

    def follow(self, runtime: TargetRuntime, texts: Mapping[int, Text]) -> None:
        """Takes over the batch as it is now: its runtime, and the texts by place in the order of the runtime's rows."""
        self._runtime, self._texts, runtime.num_texts = runtime, texts, len(texts)
        self.positions.roots[:] = [texts[row].root if row in texts else 0 for row in range(self.rows)]
        self.look_ahead()

    def look_ahead(self) -> None:
        assert self._runtime is not None
        target, length, roots = self._runtime.target, self._runtime.length, self.positions.roots
        self.ends[:] = [furthest_read(target, root) for root in roots]
        self.alike_until = length + slots_read_alike(target, length)

    def keep_up(self) -> bool:
        """Tries the target with the texts as they are, if that is due; returns whether drafting ends with it."""
        runtime, texts = self._runtime, list(self._texts.values())
        assert runtime is not None
        if self.options.depth == 0:
            return False
        longest = max(text.decoded.ids.lengths[0] for text in texts)
        ids = torch.cat([F.pad(ids, (longest - ids.shape[1], 0)) for ids in (text.decoded.batch() for text in texts)])
        found = self._found(runtime, ids, max(text.root for text in texts), ragged=len(texts) > 1)
        if found is None:
            return False
        self.known_until, self.deepest = found.until, found.depth
        if found.trees:
            return False
        self.options, self.reason = replace(self.options, depth=0), found.reason
        runtime.acceleration.off = True
        logger.warning_once(f"Nothing is drafted for batches of {type(runtime.target).__name__}: {found.reason}.")
        return True

    def _found(self, runtime: TargetRuntime, ids: torch.Tensor, root: int, ragged: bool) -> Finding | None:
        reach = furthest_read(runtime.target, root) - root
        return find_out(runtime, ids, self.size, reach, ragged=ragged)
