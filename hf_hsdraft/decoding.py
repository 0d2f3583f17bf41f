"""The round: draft, verify, commit, reuse. One call of `generate()` from its prompt to its output."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.generation.utils import GenerateDecoderOnlyOutput

from .candidate_generator import DraftOptions, HSCandidateGenerator
from .draft_tree import DraftTree
from .modeling_hsdraft import HSDrafter
from .target_runtime import TargetRuntime
from .verification import ChooseToken, Verdict, greedy_choice, processed_choice, walk

_MODEL_KWARGS = ("attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep")


@dataclass
class DraftStatistics:
    """What one call did; kept only when `return_dict_in_generate=True`.

    Attributes:
        new_tokens: tokens emitted.
        target_forwards: forwards of the target; reading the prompt is one, however it is chunked.
        accepted_lengths: drafted tokens emitted in each round after the prompt's forward.
        drafted_nodes: nodes verified in each round, the root not counted.
        prefill_seconds, draft_seconds, verify_seconds, commit_seconds, total_seconds: wall-clock time; what is left of
            the total is Python between the parts.
    """

    new_tokens: int = 0
    target_forwards: int = 0
    accepted_lengths: list[int] = field(default_factory=list)
    drafted_nodes: list[int] = field(default_factory=list)
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    commit_seconds: float = 0.0
    total_seconds: float = 0.0

    @property
    def rounds(self) -> int:
        """Rounds of drafting; the prompt's forward is none."""
        return len(self.accepted_lengths)

    @property
    def tau(self) -> float:
        """Tokens emitted per target forward, the bonus token included; plain decoding has exactly 1."""
        return self.new_tokens / max(self.target_forwards, 1)


@dataclass
class HSDraftGenerateOutput(GenerateDecoderOnlyOutput):
    """Output of `generate()` with a drafter: transformers' own fields, and `statistics` of the call."""

    statistics: DraftStatistics | None = None


class _Clock:
    """Adds wall-clock time to fields of the statistics; does nothing, and never synchronises, without them."""

    def __init__(self, statistics: DraftStatistics | None, device: torch.device) -> None:
        self._statistics = statistics
        self._cuda = device if device.type == "cuda" else None
        self._last = self._now() if statistics is not None else 0.0
        self._begin = self._last

    def _now(self) -> float:
        if self._cuda is not None:
            torch.cuda.synchronize(self._cuda)
        return time.perf_counter()

    def start(self) -> None:
        if self._statistics is not None:
            self._last = self._now()

    def stop(self, part: str) -> None:
        if self._statistics is not None:
            now = self._now()
            setattr(self._statistics, part, getattr(self._statistics, part) + now - self._last)
            self._last = now

    def finish(self) -> None:
        if self._statistics is not None:
            self._statistics.total_seconds = self._now() - self._begin


def check_target(target: Any, drafter: HSDrafter) -> None:
    """Raises a ValueError that names the field if `drafter` was made for another target."""
    config, wanted = target.config.get_text_config(), drafter.config
    made_for = f"this drafter was trained for {wanted.target_name or 'another target'}"
    for name, expected in (
        ("vocab_size", wanted.vocab_size),
        ("hidden_size", wanted.target_hidden_size),
        ("num_hidden_layers", wanted.target_num_hidden_layers),
    ):
        found = getattr(config, name)
        if found != expected:
            raise ValueError(
                f"the target has {name}={found}, the drafter expects {expected}: {made_for}. Use a drafter of this "
                "target, or train one with `hsdraft train`."
            )


def _window(target: Any) -> int:
    """Positions the target has; unlimited where its configuration names no limit."""
    window = getattr(target.config.get_text_config(), "max_position_embeddings", None)
    return sys.maxsize if window is None else window


def _check_call(target: Any, drafter: HSDrafter, input_ids: torch.Tensor, config: Any, kwargs: dict[str, Any]) -> None:
    """Everything that would make the call fail or be wrong, before any work is done."""
    check_target(target, drafter)
    if not kwargs.get("use_cache"):
        raise ValueError("use_cache=False is not possible with a drafter: verification needs the target's cache")
    extra = sorted(name for name, value in kwargs.items() if value is not None and name not in _MODEL_KWARGS)
    if extra:
        raise ValueError(
            f"{', '.join(extra)} cannot be passed together with a drafter yet: the forward that verifies a tree takes "
            f"only {', '.join(_MODEL_KWARGS)}"
        )
    if input_ids.shape[0] != 1:
        raise ValueError(
            f"the batch holds {input_ids.shape[0]} prompts; drafting supports one so far. Call generate() for each "
            "prompt, or leave assistant_model out."
        )
    window = _window(target)
    if input_ids.shape[1] > window:
        raise ValueError(
            f"the prompt has {input_ids.shape[1]} tokens, the target's context window is {window}; shorten the prompt"
        )
    if config.return_dict_in_generate:
        for name in ("output_attentions", "output_hidden_states"):
            if getattr(config, name):
                raise ValueError(f"{name}=True is not supported together with a drafter yet; leave one of them out")


def speculative_decoding(
    target: Any,
    drafter: HSDrafter,
    input_ids: torch.Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    streamer: Any = None,
    **model_kwargs: Any,
) -> HSDraftGenerateOutput | torch.Tensor:
    """Decodes one sequence with a drafter ("Make Every Draft Count"); the output has the target's own distribution.

    Takes what `generate()` hands to a decoding method, and returns what it returns: `[1, length]` token ids, or with
    `return_dict_in_generate` an [`HSDraftGenerateOutput`].

    Raises:
        ValueError: target, drafter and call do not fit together; nothing has been computed then.
    """
    _check_call(target, drafter, input_ids, generation_config, model_kwargs)
    options = DraftOptions.of(drafter, generation_config)
    cache = model_kwargs.get("past_key_values")
    runtime = TargetRuntime(target, drafter.config.target_tap_layers, cache)
    statistics = DraftStatistics() if generation_config.return_dict_in_generate else None
    clock = _Clock(statistics, target.device)
    text = _Text(input_ids, generation_config, logits_processor, stopping_criteria, streamer)

    clock.start()
    weights = drafter.borrow(target.get_input_embeddings(), target.get_output_embeddings())
    generator = HSCandidateGenerator(drafter, weights, options)
    clock.stop("draft_seconds")
    output = runtime.prefill(input_ids, generation_config, model_kwargs)
    clock.stop("prefill_seconds")
    tree = DraftTree.root(int(input_ids[0, -1]))
    verdict = text.walk(tree, output.logits[-1:])
    text.emit(tree, verdict)
    if not verdict.finished:
        rows = runtime.real_rows(output)
        next_tokens = text.ids[0, -len(output.taps) :][rows]  # x_{i+1} of each row i, up to the token just chosen
        generator.read(output.taps[rows], next_tokens, output.positions[rows])
    position = int(output.positions[-1]) + 1
    window = _window(target)
    while not verdict.finished:
        clock.start()
        # No node beyond the text's greatest length, nor beyond the last position that the target has.
        tree = generator.draft(max_depth=max(min(text.room - 1, window - 1 - position), 0))
        clock.stop("draft_seconds")
        with runtime.undone_on_error():
            output = runtime.verify(tree, position)
            verdict = text.walk(tree, output.logits)
            clock.stop("verify_seconds")
            text.emit(tree, verdict)
        runtime.commit(tree, verdict.path)
        emitted = len(verdict.path) + 1
        if not verdict.finished:
            generator.settle([tree.tokens[node] for node in verdict.path])
            rows = torch.tensor([0, *verdict.path], device=output.taps.device)
            generator.read(output.taps[rows], text.ids[0, -emitted:], output.positions[rows])
        position += emitted
        clock.stop("commit_seconds")
        if statistics is not None:
            statistics.accepted_lengths.append(verdict.num_drafted)
            statistics.drafted_nodes.append(len(tree) - 1)
    if streamer is not None:
        streamer.end()
    if statistics is None:
        return text.ids
    clock.finish()
    statistics.new_tokens = text.length - input_ids.shape[1]
    statistics.target_forwards = statistics.rounds + 1
    return HSDraftGenerateOutput(
        sequences=text.ids,
        scores=text.scores,
        logits=text.raw_logits,
        past_key_values=cache,
        statistics=statistics,
    )


class _Text:
    """The text of a call as it grows, with the rules that choose its tokens and end it."""

    def __init__(
        self,
        input_ids: torch.Tensor,
        generation_config: Any,
        logits_processor: Any,
        stopping_criteria: Any,
        streamer: Any,
    ) -> None:
        self.ids = input_ids
        self._config = generation_config
        self._process = logits_processor
        self._stop = stopping_criteria
        self._streamer = streamer
        wanted = generation_config.return_dict_in_generate
        self.scores: tuple[torch.Tensor, ...] | None = () if wanted and generation_config.output_scores else None
        self.raw_logits: tuple[torch.Tensor, ...] | None = () if wanted and generation_config.output_logits else None
        self._visited: list[tuple[torch.Tensor, torch.Tensor]] = []

    @property
    def length(self) -> int:
        return self.ids.shape[1]

    @property
    def room(self) -> int:
        """Tokens that may still be emitted."""
        return self._config.max_length - self.length

    def walk(self, tree: DraftTree, logits: torch.Tensor) -> Verdict:
        """What of the tree is accepted, by the target's own choices in `logits` `[nodes, V]`."""
        self._visited.clear()
        return walk(tree, self._chooser(logits), self._ends)

    def emit(self, tree: DraftTree, verdict: Verdict) -> None:
        """Appends what was accepted, and the target's token after it."""
        tokens = [*(tree.tokens[node] for node in verdict.path), verdict.next_token]
        new = self.ids.new_tensor([tokens])
        self.ids = torch.cat([self.ids, new], dim=-1)
        self.scores, self.raw_logits = self._with_visited()
        if self._streamer is not None:
            self._streamer.put(new.cpu())

    def _chooser(self, logits: torch.Tensor) -> ChooseToken:
        keep = self.scores is not None or self.raw_logits is not None
        if not self._config.do_sample and not keep and len(self._process) == 0:
            return greedy_choice(logits)
        on_scores: Callable[..., None] | None = (
            (lambda raw, scores: self._visited.append((raw, scores))) if keep else None
        )
        return processed_choice(logits, self.ids, self._process, self._config.do_sample, on_scores)

    def _ends(self, tokens: list[int]) -> bool:
        """Whether the user's stopping criteria end the text after these tokens, asked once for each."""
        ids = torch.cat([self.ids, self.ids.new_tensor([tokens])], dim=-1)
        return bool(self._stop(ids, self._with_visited()[0]).all())

    def _with_visited(self) -> tuple[tuple[torch.Tensor, ...] | None, tuple[torch.Tensor, ...] | None]:
        """Scores and raw logits of the text, those of the tokens chosen in the current walk included."""
        scores, raw_logits = self.scores, self.raw_logits
        if scores is not None:
            scores = (*scores, *(processed for _, processed in self._visited))
        if raw_logits is not None:
            raw_logits = (*raw_logits, *(raw for raw, _ in self._visited))
        return scores, raw_logits
