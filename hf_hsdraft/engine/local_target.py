"""The target of a call where it runs in this process: one forward verifies the drafts of all texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from ..core.draft_tree import DraftTree
from ..core.tensors import on_device
from ..core.tuning import TUNING
from ..drafters.base.protocol import Accepted, Ask
from ..runtime.target_outputs import TargetOutput, picked_taps
from ..runtime.target_runtime import TargetRuntime
from ..verify.verdict import Verdict
from .decoded_texts import DecodedTexts
from .draft_limits import DraftLimits
from .recorder import Recorder
from .text_positions import TextPositions


class LocalTarget:
    """A target and the texts that grow by it.

    Args:
        runtime: of the target, after the prompts' forward.
        texts: of the call, with their first tokens.
        limits: what may be drafted.
        positions: where the texts are.
        recorder: of attentions and hidden states.
        taps: the hidden states that the drafter reads; a verifier may read others too.

    Attributes:
        read: the texts that forwards are of: all but those that have ended and left.
    """

    def __init__(
        self,
        runtime: TargetRuntime,
        texts: DecodedTexts,
        limits: DraftLimits,
        positions: TextPositions,
        recorder: Recorder,
        taps: Sequence[int] = (),
    ) -> None:
        self._runtime, self._texts, self._limits = runtime, texts, limits
        self._positions, self._recorder, self._taps = positions, recorder, taps
        self.read = list(range(len(texts.rows)))
        self._closed: set[int] = set()  # texts whose last token has been read

    @property
    def forwards(self) -> int:
        """Number of forwards of the target so far."""
        return self._runtime.forwards

    def own_taps(self, taps: torch.Tensor) -> torch.Tensor:
        """Returns those hidden states that the drafter reads, of all side by side `[..., taps * D]`."""
        return picked_taps(taps, self._runtime.tap_layers, self._taps)

    def asks(self) -> list[Ask]:
        """The drafts that are wanted for the next round, of the texts that still grow."""
        active = self._texts.active
        lengths = {row: self._texts.new_tokens(row) for row in active}
        decide, shortest = waited_for(lengths), min(lengths.values(), default=0)
        # Sizes that are fixed stay so when texts leave.
        options = self._limits.options
        sharing = len(self._texts.rows) if options.tree_sizing == "fixed" else len(self.read)
        depths, options = self._limits.depths(active, sharing), options.shared_by(sharing)
        return [
            Ask(
                row,
                self._texts.last_token(row),
                min(depths[row], options.depth),
                options.tree_size,
                sharing,
                chain=options.beam_width == 1,
                reach=depths[row],
                ahead=lengths[row] - shortest,
                decides=row in decide,
            )
            for row in active
        ]

    def advance(self, drafts: Sequence[DraftTree], verified: Callable[[], None] = lambda: None) -> list[Accepted]:
        """Verifies the drafts in one forward, and emits and keeps what is accepted.

        Args:
            drafts: of the texts that still grow, in the order of `asks`.
            verified: called when the forward is done and everything is decided.
        """
        runtime, texts, active = self._runtime, self._texts, self._texts.active
        trees = {row: self._undrafted(row) for row in self.read}
        trees.update(zip(active, drafts, strict=True))
        place = {row: index for index, row in enumerate(self.read)}
        with runtime.undone_on_error():
            output = runtime.verify(list(trees.values()), texts.batch())
            rule_taps = picked_taps(output.taps, runtime.tap_layers, texts.verifier.taps)
            self._limits.note_step(texts.last_token(0), output.logits[:, 0])
            verdicts = {
                row: texts.judge(row, trees[row], output.logits[place[row]], rule_taps[place[row]]) for row in active
            }
            if runtime.in_step and active:
                shortest = min(len(verdict.path) for verdict in verdicts.values())
                verdicts = {row: verdict.cut(trees[row], shortest) for row, verdict in verdicts.items()}
            verified()
            for row, verdict in verdicts.items():
                texts.emit(row, trees[row], verdict, self._recorder.path(row, verdict.path))
            texts.end_batch()
            if not self._limits.presumed:  # a refusal comes before anything is streamed
                texts.stream()
            beyond = texts.beyond_end()
            runtime.commit([self._kept(row, verdicts, beyond[row]) for row in self.read])
        if runtime.in_step and active:  # rows that have ended are read on with the others
            for row in set(trees) - set(active):
                self._positions.roots[row] += 1 + shortest
        return [self._news(row, output.taps[place[row]], verdict) for row, verdict in verdicts.items()]

    def _undrafted(self, row: int) -> DraftTree:
        """What is read of a text without a draft: its last token, unless plain decoding would not read that either."""
        idle = row in self._closed or not self._texts.room(row)
        return (DraftTree.idle if idle else DraftTree.root)(self._texts.last_token(row))

    def _kept(self, row: int, verdicts: dict[int, Verdict], beyond: int) -> list[int] | None:
        """The nodes that are kept of a text's tree; of one that has ended its root, once: plain decoding reads its end.

        Args:
            beyond: number of tokens of the text that are beyond the end of the batch.
        """
        if row in verdicts:
            path = verdicts[row].path
            return path[: max(len(path) - beyond, 0)]
        if row in self._closed:
            return None
        self._closed.add(row)
        return []

    def _news(self, row: int, taps: torch.Tensor, verdict: Verdict) -> Accepted:
        """The root and its accepted path, of a tree with taps `[nodes, taps * D]`."""
        tokens = self._texts.rows[row].emitted
        begin = self._positions.roots[row]
        self._positions.roots[row] += len(tokens)
        places = torch.arange(begin, begin + len(tokens))
        nodes = on_device([0, *verdict.path], taps.device)
        own = self.own_taps(taps[nodes])
        return Accepted(row, tokens, own, places, torch.tensor(tokens), (), verdict.num_drafted, len(verdict.relaxed))

    def staying(self) -> list[int]:
        """Returns the texts that stay if ended ones leave the forwards now; empty if leaving does not pay yet."""
        staying = [row for row in self.read if row not in self._closed]
        return staying if len(staying) <= TUNING.leaving_share * len(self.read) else []

    def keep(self, rows: Sequence[int]) -> None:
        """From here on forwards are of these texts alone."""
        self._runtime.keep_rows([self.read.index(row) for row in rows])
        self.read = list(rows)

    def furthest(self) -> int:
        """The greatest position of the last tokens of the texts that are read."""
        return max(self._positions.roots[row] for row in self.read)

    def read_ends(self) -> None:
        """Reads the ends of texts that ended in the last round, but not as the longest: plain decoding does so too."""
        texts, runtime = self._texts, self._runtime
        rows = [row for row in self.read if row not in self._closed and texts.rows[row].ids.shape[1] < texts.length()]
        if not rows or not runtime.trees:
            return
        trees = [self._undrafted(row) for row in self.read]
        with runtime.undone_on_error():
            runtime.verify(trees, texts.batch())
            runtime.commit([[] if row in rows else None for row in self.read])


def waited_for(lengths: Mapping[int, int]) -> list[int]:
    """The texts that a batch waits for, by their lengths: it has ended when the last of them has."""
    shortest = min(lengths.values(), default=0)
    return [row for row, length in lengths.items() if length - shortest <= TUNING.abreast]


def prompt_news(
    texts: DecodedTexts,
    output: TargetOutput,
    positions: TextPositions,
    own_taps: Callable[[torch.Tensor], torch.Tensor],
    inputs_embeds: torch.Tensor | None,
    runtime: TargetRuntime,
) -> list[Accepted]:
    """The news of the prompts: their taps, each with the token that follows.

    Args:
        own_taps: picks those that the drafter reads.
        inputs_embeds: `[B, length, D]`, for prompts that were given so.
    """
    count, news, attended = output.taps.shape[1], [], runtime.rows.attended
    for row, text in enumerate(texts.rows):
        known = text.ids[0, :-1]
        if attended is not None and 0 < len(known) <= attended.shape[1]:  # what is padding is known
            known = known[attended[row, -len(known) :].to(known.device)]
        real = positions.real[row].nonzero().flatten()
        taps, places = own_taps(output.taps[row, real.to(output.taps.device)]), positions.prompt[row, real]
        earlier, tokens = known[-TUNING.most_known :].tolist(), [texts.last_token(row)]
        if inputs_embeds is not None and text.ids.shape[1] <= count:
            after = inputs_embeds[row, inputs_embeds.shape[1] - count + 1 :]
            embeds = after[real[:-1].to(after.device)]
            news.append(Accepted(row, tokens, taps, places, text.ids[0, -1:], earlier, embeds=embeds))
        else:
            following = text.ids[0, -count:][real.to(text.ids.device)]
            news.append(Accepted(row, tokens, taps, places, following, earlier))
    return news
