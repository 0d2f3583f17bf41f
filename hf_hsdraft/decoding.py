"""The round: draft, verify, commit, reuse. One call of `generate()` from its prompt to its output."""

from __future__ import annotations

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
        target_forwards: forwards of the target, the prompt's included.
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
    window = getattr(target.config.get_text_config(), "max_position_embeddings", None)
    if window is not None and input_ids.shape[1] > window:
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
    verdict = walk(tree, text.chooser(output.logits[-1:]))
    _, finished = text.emit(tree, verdict)
    if not finished:
        rows = runtime.real_rows(output)
        next_tokens = text.ids[0, -len(output.taps) :][rows]  # x_{i+1} of each row i, up to the token just chosen
        generator.read(output.taps[rows], next_tokens, output.positions[rows])
    position = int(output.positions[-1]) + 1
    while not finished:
        clock.start()
        tree = generator.draft(max_depth=text.room - 1)
        clock.stop("draft_seconds")
        with runtime.undone_on_error():
            output = runtime.verify(tree, position)
            verdict = walk(tree, text.chooser(output.logits))
            clock.stop("verify_seconds")
            emitted, finished = text.emit(tree, verdict)
        runtime.commit(tree, verdict.path[: emitted - 1])
        if not finished:
            generator.settle([tree.tokens[node] for node in verdict.path])
            rows = torch.tensor([0, *verdict.path], device=output.taps.device)
            generator.read(output.taps[rows], text.ids[0, -emitted:], output.positions[rows])
        position += emitted
        clock.stop("commit_seconds")
        if statistics is not None:
            statistics.accepted_lengths.append(min(emitted, len(verdict.path)))
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

    def chooser(self, logits: torch.Tensor) -> ChooseToken:
        """The target's own choice at each node, for `logits` `[nodes, V]`."""
        keep = self.scores is not None or self.raw_logits is not None
        if not self._config.do_sample and not keep and len(self._process) == 0:
            return greedy_choice(logits)
        self._visited.clear()
        on_scores: Callable[..., None] | None = (
            (lambda raw, scores: self._visited.append((raw, scores))) if keep else None
        )
        return processed_choice(logits, self.ids, self._process, self._config.do_sample, on_scores)

    def emit(self, tree: DraftTree, verdict: Verdict) -> tuple[int, bool]:
        """Appends the accepted tokens up to the first that ends the text: how many, and whether one did."""
        before, finished = self.length, False
        tokens = [*(tree.tokens[node] for node in verdict.path), verdict.next_token]
        longest = torch.cat([self.ids, self.ids.new_tensor([tokens])], dim=-1)
        for index in range(len(tokens)):
            self.ids = longest[:, : before + index + 1]
            if self._visited:
                raw, scores = self._visited[index]
                self.scores = None if self.scores is None else (*self.scores, scores)
                self.raw_logits = None if self.raw_logits is None else (*self.raw_logits, raw)
            if bool(self._stop(self.ids, self.scores).all()):
                finished = True
                break
        if self._streamer is not None:
            self._streamer.put(self.ids[:, before:].cpu())
        return self.length - before, finished
