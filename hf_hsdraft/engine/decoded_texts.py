"""The growing texts of a call, and its rules for choosing tokens and for ending, as single steps have them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from transformers import LogitsProcessorList
from transformers.generation import logits_process
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

from ..core.draft_tree import DraftTree
from ..core.tensors import on_device
from ..core.tuning import SPARE_PART, SPARE_TOKENS
from ..verify.foresight import Draws, Foresight
from ..verify.verdict import Nodes, Verdict, Verifier, draw_token
from .row_processors import RowProcessors

# Library processors that depend on the scores alone, so they can process a drafter's too.
_WARPERS = tuple(
    getattr(logits_process, f"{name}LogitsWarper")
    for name in ("Temperature", "TopK", "TopP", "MinP", "Typical", "Epsilon")
)

# Library criteria that treat each row alone and keep no state: they can be asked about a single row.
_ROW_WISE_CRITERIA = (EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StopStringCriteria)

# Outputs of one token besides its scores, for `return_dict_in_generate`: tensors by layer, by name of the output.
StepOutputs = dict[str, tuple[torch.Tensor, ...]]


class TextIds:
    """Ids of rows that grow at their own pace, from prompts `[B, length]`; int64 once there are new ones.

    A new token is written behind its row; nothing else is copied, as long as there is room.

    Attributes:
        lengths: number of tokens of each row.
    """

    def __init__(self, prompts: torch.Tensor) -> None:
        self.lengths = [prompts.shape[1]] * len(prompts)
        self._room = prompts
        self._given = True  # the buffer is the caller's tensor, which stays as it is

    @property
    def device(self) -> torch.device:
        return self._room.device

    def of(self, row: int) -> torch.Tensor:
        """`[1, length]`, a view."""
        room = self._room if len(self._room) == 1 else self._room[row : row + 1]
        return room[:, : self.lengths[row]]

    def of_alike(self, rows: Sequence[int]) -> torch.Tensor:
        """`[n, length]` of rows of equal length; a view of all rows."""
        room = self._room if len(rows) == len(self._room) else self._room[on_device(rows, self.device)]
        return room[:, : self.lengths[rows[0]]]

    def begin(self, length: int) -> torch.Tensor:
        """`[B, length]`, a view of the first tokens of all rows, which have so many."""
        return self._room[:, :length]

    def all(self) -> torch.Tensor:
        """`[B, longest]`, shorter rows padded with 0 at the left."""
        longest = max(self.lengths)
        if min(self.lengths) == longest:
            return self.begin(longest)
        return torch.cat([F.pad(self.of(row), (longest - length, 0)) for row, length in enumerate(self.lengths)])

    def append(self, row: int, tokens: Sequence[int]) -> None:
        begin, end = self.lengths[row], self.lengths[row] + len(tokens)
        self._make_room(end)
        self._room[row, begin:end] = on_device(tokens, self.device)
        self.lengths[row] = end

    def append_to_each(self, rows: Sequence[int], tokens: Sequence[int]) -> None:
        """Appends a token to each of `rows`."""
        ends = [self.lengths[row] for row in rows]
        self._make_room(max(ends) + 1)
        new = on_device(tokens, self.device)
        if len(rows) == len(self._room) and min(ends) == max(ends):
            self._room[:, ends[0]] = new
        else:
            self._room[on_device(rows, self.device), on_device(ends, self.device)] = new
        for row in rows:
            self.lengths[row] += 1

    def _make_room(self, length: int) -> None:
        if length > self._room.shape[1] or self._given:
            spare = SPARE_TOKENS + length // SPARE_PART
            self._room = F.pad(self._room, (0, length + spare - self._room.shape[1])).long()
            self._given = False


@dataclass
class _Row:
    end: int = 0  # length at which it ended; 0 while it grows
    emitted: list[int] = field(default_factory=list)  # the tokens appended last
    ends: list[int] = field(default_factory=list)  # lengths after rounds not streamed yet
    scores: tuple[torch.Tensor, ...] = ()  # `[1, V]` for each new token, if asked for, as `logits`
    logits: tuple[torch.Tensor, ...] = ()
    judged: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)  # raw, processed `[1, V]`
    steps: list[StepOutputs] = field(default_factory=list)  # further outputs of each new token, if asked for


class _KnownEnds:
    """Ends of texts by a token or a length, which are known without criteria's tensors."""

    def __init__(self, criteria: Any) -> None:
        eos = [one.eos_token_id for one in criteria if type(one) is EosTokenCriteria]
        self._eos = {int(token) for ids in eos for token in ids.flatten().tolist()}
        self._limits = [one for one in criteria if type(one) is MaxLengthCriteria]

    def __call__(self, length: int, token: int) -> bool:
        """Whether a text of `length` tokens ends with the last one. Criteria warn of the context window."""
        for one in self._limits:
            if one.max_position_embeddings is not None and length > one.max_position_embeddings:
                one(torch.empty(1, length, dtype=torch.bool), None)
        return token in self._eos or any(length >= one.max_length for one in self._limits)


class DecodedTexts:
    """Texts of a batch, from prompts `input_ids` `[B, length]` and arguments as `generate()` prepared them."""

    def __init__(
        self,
        input_ids: torch.Tensor,
        generation_config: Any,
        logits_processor: LogitsProcessorList,
        stopping_criteria: Any,
        streamer: Any,
        verifier: Verifier,
    ) -> None:
        self.ids = TextIds(input_ids)  # prompts and new tokens
        self.rows = [_Row() for _ in input_ids]
        self.prompt_length = input_ids.shape[1]
        self._config, self._process = generation_config, logits_processor
        self._streamer, self._streamed = streamer, 0
        self.verifier = verifier
        self.foresight: Foresight | None = None  # what drafts may know of coming draws; None without draws
        wanted = generation_config.return_dict_in_generate
        self.keeps_scores = bool(wanted and generation_config.output_scores)
        self.keeps_logits = bool(wanted and generation_config.output_logits)
        by_row = [len(self.rows) == 1 or type(one) in _ROW_WISE_CRITERIA for one in stopping_criteria]
        self._stop = StoppingCriteriaList(itertools.compress(stopping_criteria, by_row))
        self._stop_batch = StoppingCriteriaList(itertools.compress(stopping_criteria, (not one for one in by_row)))
        self.stops_together = not all(by_row)  # then an end may be found after further tokens of that row
        self._steps_asked = 0  # steps that `_stop_batch` was asked about
        self._step_scores: tuple[torch.Tensor, ...] = ()  # `[B, V]` for each, if scores are returned
        # Plain decoding pads rows that a token ended, and lets rows grow that ended otherwise.
        self._has_eos = any(hasattr(criteria, "eos_token_id") for criteria in stopping_criteria)
        # These need only a text's length and last token, which are known without waiting for the device.
        self._known_stop = all(type(one) in (EosTokenCriteria, MaxLengthCriteria) for one in self._stop)
        self._known_ends = _KnownEnds(stopping_criteria)
        pad = getattr(generation_config, "_pad_token_tensor", None)
        self.pad_token_id = 0 if pad is None else int(pad)
        self._processed = RowProcessors(logits_processor, len(self.rows))
        self._draws: list[Draws] | None = None

    @property
    def active(self) -> list[int]:
        """Rows that still grow."""
        if self._has_eos or not all(row.end for row in self.rows):
            return [
                index for index, row in enumerate(self.rows) if not (row.end and self._has_eos) and self.room(index)
            ]
        length = self.length()
        return [index for index, own in enumerate(self.ids.lengths) if own < length]

    def room(self, index: int) -> int:
        """Tokens that may still be emitted in a row."""
        return max(self._config.max_length - self.ids.lengths[index], 0)

    def new_tokens(self, index: int) -> int:
        """Tokens of a row after its prompt, without those beyond an end found later."""
        row, length = self.rows[index], self.ids.lengths[index]
        return (min(length, row.end) if row.end and self._has_eos else length) - self.prompt_length

    def all_new_tokens(self) -> int:
        """Number of new tokens over all rows once they have ended."""
        most = self.length() - self.prompt_length
        return sum(min(self.new_tokens(row), most) for row in range(len(self.rows)))

    def beyond_end(self) -> list[int]:
        """For each row, the tokens beyond the end of the batch; 0 while a row grows."""
        if self.active:
            return [0] * len(self.rows)
        longest = self.length()
        return [max(own - longest, 0) for own in self.ids.lengths]

    def last_token(self, index: int) -> int:
        return self.rows[index].emitted[-1]

    def of_rows(self, rows: Sequence[int]) -> torch.Tensor:
        """`[n, length]` up to each row's last token; shorter rows are padded at the left."""
        return self.ids.all()[list(rows)]

    def foresee(self, vocab_size: int, generator: torch.Generator | None = None) -> None:
        """Lets drafts know coming draws over `vocab_size` logits, where tokens are the target's own; see `Draws`."""
        if not self._config.do_sample or not self.verifier.own_draws:
            return
        self._draws = Draws.of_rows(len(self.rows), self.ids.device, vocab_size, generator)
        if self._draws is not None:
            warpers = [one for one in self._process if type(one) in _WARPERS]
            self.foresight = Foresight(self._draws, warpers, vocab_size)

    def start(self, logits: torch.Tensor) -> None:
        """Processes the scores of all rows' first new tokens, `[B, V]`, at once, as plain decoding does."""
        if len(self.rows) == 1 or len(self._process) == 0:
            return
        ids, rows = self.ids.all(), range(len(self.rows))
        raw = logits.to(ids.device, torch.float32, copy=True)
        scores = self._processed.of_alike(rows, ids, raw.clone() if self.keeps_logits else raw)
        for row, *judged in zip(self.rows, raw.split(1), scores.to(ids.device).split(1), strict=True):
            row.judged[0] = judged[0], judged[1]

    def prune(self, index: int, tree: DraftTree) -> DraftTree:
        """A row's tree without nodes that are known to be rejected. Rules for drawn nodes have to see all of them."""
        if self.verifier.drawn_nodes or not self._process:
            return tree
        return self._processed.prune(index, self.ids.of(index), tree)

    @property
    def processed(self) -> bool:
        """Whether processors change the scores or the call returns them."""
        return self.keeps_scores or self.keeps_logits or len(self._process) > 0

    @property
    def follows_logits(self) -> bool:
        """Whether the greatest logit of a node is the token that follows there."""
        return not self._config.do_sample and not self.processed and self.verifier.own_choices

    def judge(
        self,
        index: int,
        tree: DraftTree,
        logits: torch.Tensor,
        taps: torch.Tensor | None = None,
        choices: Sequence[int] | None = None,
    ) -> Verdict:
        """Judges a row's tree by the target's `logits` `[nodes, V]` and hidden states `[nodes, ...]`.

        `choices` are the tokens of the greatest logits, where they have been read already.
        """
        row = self.rows[index]

        def scores_at(node: int, tokens: list[int]) -> torch.Tensor:
            if node not in row.judged:  # once, as some processors count
                ids = self._followed(index, tokens)
                raw = logits[node : node + 1].to(ids.device, torch.float32, copy=True)
                scores = self._processed(index, ids, raw.clone() if self.keeps_logits else raw)
                row.judged[node] = raw, scores.to(ids.device)
            return row.judged[node][1]

        draw = None
        if self._config.do_sample:
            draw = draw_token if self._draws is None else self._draws[index]
        processed = self.processed

        def ask_along(path: Sequence[int]) -> None:
            """Processes scores that the call returns or processors track, where the rule did not need them."""
            for depth, node in enumerate((0, *path) if processed else ()):
                scores_at(node, [tree.tokens[above] for above in path[:depth]])

        def ends(path: list[int], tokens: list[int]) -> bool:
            ask_along(path)
            return self._ends(index, path, tokens)

        verdict = self.verifier.judge(tree, Nodes(logits, scores_at, ends, draw, processed, taps, choices))
        ask_along(verdict.path)
        return verdict

    def emit(self, index: int, tree: DraftTree, verdict: Verdict, steps: Sequence[StepOutputs] = ()) -> None:
        """Appends the accepted path and the token after it."""
        row = self.rows[index]
        tokens = [*(tree.tokens[node] for node in verdict.path), verdict.next_token]
        if self._draws is not None:
            self._draws[index].settle(len(tokens))
        self.ids.append(index, tokens)
        row.scores, row.logits = self._with_path(row, verdict.path)
        row.judged.clear()
        row.steps.extend(steps)
        self._note(index, tokens, verdict)

    @property
    def chosen_together(self) -> bool:
        """Whether `choose` serves: rows without drafts need nothing but their most probable tokens."""
        more = self._config.do_sample or self.keeps_scores or self.keeps_logits or self.verifier.taps
        return self.verifier.own_choices and not more

    def choose(self, rows: Sequence[int], logits: torch.Tensor) -> dict[int, Verdict]:
        """What `judge` decides for lone roots, by the target's `logits` `[n, V]`: as plain decoding, rows together.

        Rows of equal length have processors and criteria in common; without these all rows have.
        """
        groups: dict[int, list[int]] = {}
        for place, row in enumerate(rows):
            groups.setdefault(self.ids.lengths[row] if self._process or not self._known_stop else 0, []).append(place)
        verdicts: dict[int, Verdict] = {}
        for places in groups.values():
            alike = [rows[place] for place in places]
            scores = logits if len(groups) == 1 else logits[on_device(places, logits.device)]
            if self._process:
                ids = self.ids.of_alike(alike)
                scores = self._processed.of_alike(alike, ids, scores.to(ids.device, torch.float32, copy=True))
            tokens = scores.max(dim=-1).indices.tolist()
            for row, token, ends in zip(alike, tokens, self._end_with(alike, tokens), strict=True):
                verdicts[row] = Verdict([], token, ends, 0)
        return {row: verdicts[row] for row in rows}

    def emit_chosen(self, verdicts: dict[int, Verdict]) -> None:
        """Appends what `choose` has chosen."""
        if not verdicts:
            return
        self.ids.append_to_each(list(verdicts), [verdict.next_token for verdict in verdicts.values()])
        for index, verdict in verdicts.items():
            self._note(index, [verdict.next_token], verdict)

    def _note(self, index: int, tokens: list[int], verdict: Verdict) -> None:
        """Notes what was appended to a row."""
        row, length = self.rows[index], self.ids.lengths[index]
        row.emitted = tokens
        row.ends.append(length)
        if verdict.finished and not row.end:
            row.end = length

    def end_batch(self) -> None:
        """Asks criteria that may look at all rows, or keep state, once for each step that all rows have taken.

        Plain decoding asks them in the same way. A row ahead of the others may turn out to have ended before its last
        token; what is beyond its end is dropped.
        """
        while self._stop_batch and self._steps_asked < self._steps_taken():
            length = self.prompt_length + self._steps_asked + 1
            if self.keeps_scores:
                scores = [row.scores[: self.new_tokens(index)] for index, row in enumerate(self.rows)]
                self._step_scores = (*self._step_scores, stacked(scores, self._steps_asked))
            ended = self._stop_batch(self.sequences(length), self._step_scores if self.keeps_scores else None)
            for row, has_ended in zip(self.rows, ended.tolist(), strict=True):
                if has_ended and (not row.end or row.end > length):
                    row.end = length
            self._steps_asked += 1

    def stream(self) -> None:
        """Streams new tokens: for one text the tokens `[n]` of each round, for a batch `[B]` of each step.

        Plain decoding streams `[1]` and `[B]`: streamers may count items. The last token of a round is the target's
        own, those before it were drafted.
        """
        if self._streamer is None:
            return
        ready = self._steps_taken()
        ids = self.sequences(self.prompt_length + max(ready, self._streamed))
        if len(self.rows) == 1:
            for end in self.rows[0].ends:
                self._streamer.put(ids[0, self.prompt_length + self._streamed : end].cpu())
                self._streamed = end - self.prompt_length
            self.rows[0].ends.clear()
        while self._streamed < ready:
            self._streamer.put(ids[:, self.prompt_length + self._streamed].cpu())
            self._streamed += 1

    def _steps_taken(self) -> int:
        """Steps of plain decoding whose tokens are known in all rows."""
        growing = [self.new_tokens(index) for index, row in enumerate(self.rows) if not (row.end and self._has_eos)]
        if all(row.end for row in self.rows):
            growing.append(self.length() - self.prompt_length)
        return min(growing)

    def end_stream(self) -> None:
        if self._streamer is not None:
            self._streamer.end()

    def length(self) -> int:
        """Length of the batch when all rows have ended."""
        return max(row.end or own for row, own in zip(self.rows, self.ids.lengths, strict=True))

    def sequences(self, length: int | None = None) -> torch.Tensor:
        """`[B, length]`, with padding tokens after rows that ended earlier."""
        length = self.length() if length is None else length
        kept = [min(length, self.prompt_length + self.new_tokens(index)) for index in range(len(self.rows))]
        ids = self.ids.begin(length).clone()
        if min(kept) < length:
            places = torch.arange(length, device=ids.device)
            ids.masked_fill_(places >= on_device(kept, ids.device)[:, None], self.pad_token_id)
        return ids

    def _ends(self, index: int, path: list[int], tokens: list[int]) -> bool:
        """Whether a row ends after these tokens, chosen at root and `path`. Criteria are asked once for each token."""
        row = self.rows[index]
        length = self.ids.lengths[index] + len(tokens)
        if row.end:  # it grows until the other rows have ended
            return length >= self._config.max_length
        if self._known_stop:
            return self._known_ends(length, tokens[-1])
        ids = self._followed(index, tokens)
        scores = self._with_path(row, path)[0] if self.keeps_scores else None
        return bool(self._stop(ids, scores)[0])

    def _end_with(self, rows: Sequence[int], tokens: Sequence[int]) -> list[bool]:
        """As `_ends`, for a token of each of several rows; of equal length, unless only length and token count."""
        if self._known_stop:
            return [self._ends(row, [], [token]) for row, token in zip(rows, tokens, strict=True)]
        ids = torch.cat([self.ids.of_alike(rows), on_device(tokens, self.ids.device)[:, None]], dim=-1)
        ended = self._stop(ids, None).tolist() if any(not self.rows[row].end for row in rows) else [False] * len(rows)
        most = ids.shape[1] >= self._config.max_length
        return [most if self.rows[row].end else end for row, end in zip(rows, ended, strict=True)]

    def _followed(self, index: int, tokens: Sequence[int]) -> torch.Tensor:
        """`[1, n]`, a row's text with further tokens."""
        ids = self.ids.of(index)
        return torch.cat([ids, on_device([tokens], ids.device)], dim=-1) if tokens else ids

    def _with_path(self, row: _Row, path: Sequence[int]) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        scores, logits = row.scores, row.logits
        if self.keeps_scores:
            scores = (*scores, *(row.judged[node][1] for node in (0, *path)))
        if self.keeps_logits:
            logits = (*logits, *(row.judged[node][0] for node in (0, *path)))
        return scores, logits


def stacked(rows: Sequence[Sequence[torch.Tensor]], step: int) -> torch.Tensor:
    """`[B, ...]` of one step; 0 where a row had ended."""
    sample = max(rows, key=len)[step]
    return torch.cat([row[step] if step < len(row) else torch.zeros_like(sample) for row in rows])
