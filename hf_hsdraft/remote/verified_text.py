"""A text that the server verifies drafts for: tokens, rules, RNG, keys and values."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from transformers import DynamicCache

from ..core.checks import nearest_option
from ..core.draft_tree import DraftTree
from ..core.tensors import device_of
from ..engine.decoded_texts import DecodedTexts
from ..verify.foresight import Draws
from ..verify.verdict import OwnChoice
from .messages import PIECE_BYTES, Open, unpacked_ints
from .wire import MOST_ITEMS, is_setting

# Options of `generate()` that a device may set: they choose tokens or end the text, and are cheap to apply.
OPTIONS = frozenset(
    {
        "begin_suppress_tokens", "do_sample", "eos_token_id", "epsilon_cutoff", "eta_cutoff", "forced_eos_token_id",
        "max_length", "max_new_tokens", "min_length", "min_new_tokens", "min_p", "no_repeat_ngram_size",
        "repetition_penalty", "suppress_tokens", "temperature", "top_h", "top_k", "top_p", "typical_p",
    }
)  # fmt: skip


_SKIP_SECONDS = 0.02  # after which the texts that other devices open have their turn


def check_options(options: Mapping[str, Any]) -> None:
    """Raises a ValueError for options of `generate()` that are not possible over a connection."""
    for name, value in options.items():
        if name not in OPTIONS:
            near = nearest_option(name, OPTIONS)
            hint = f"; did you mean {near}?" if near else "."
            raise ValueError(
                f"{name[:64]!r} is not possible with a remote target{hint} Options that choose or end tokens are "
                f"possible: {', '.join(sorted(OPTIONS))}"
            )
        if not is_setting(name, value):
            raise ValueError(
                f"{name}={repr(value)[:64]} is invalid: expected a number, True or False, or a list of at most "
                f"{MOST_ITEMS} token ids"
            )


def check_tokens(options: Mapping[str, Any], rows: int) -> None:
    """Raises a ValueError for options with token ids outside the vocabulary of `rows` tokens."""
    for name in (name for name in options if name.endswith(("_tokens", "_token_id"))):
        value = options[name] if isinstance(options[name], list) else [options[name]]
        if "new" not in name and not all(one is None or (type(one) is int and 0 <= one < rows) for one in value):
            raise ValueError(f"{name} holds ids that are no tokens: the target's vocabulary has {rows}")


class SeededTexts(DecodedTexts):
    """The one text of a session, sampled by a seeded RNG."""

    def draw_by(self, draws: Draws) -> None:
        self._draws = [draws]


def skipped_draws(generator: torch.Generator, size: int, count: int) -> Iterator[None]:
    """Lets an RNG make the random numbers of `count` draws from logits of `size`; yields every few milliseconds.

    A draw consumes the same random numbers whatever its outcome. They are made without a draw where that leads to the
    same state: as bare numbers, or by a draw from one candidate.
    """
    if not count:
        return
    begin, device = generator.get_state(), generator.device
    numbers = torch.empty(2 * size, dtype=torch.int32, device=device)

    def draw(candidates: int) -> None:
        torch.multinomial(torch.ones(1, candidates, device=device), num_samples=1, generator=generator)

    def after(step: Callable[[], Any]) -> torch.Tensor:
        generator.set_state(begin)
        step()
        return generator.get_state()

    ways: list[Callable[[], Any]] = [lambda: draw(1), lambda: numbers.random_(generator=generator), lambda: draw(size)]
    whole = after(ways[-1])
    step = next(way for way in ways if torch.equal(after(way), whole))
    generator.set_state(begin)
    until = time.monotonic() + _SKIP_SECONDS
    for _ in range(count):
        step()
        if time.monotonic() > until:
            yield
            until = time.monotonic() + _SKIP_SECONDS


class VerifiedText:
    """A text of a session; raises a ValueError if an option is not possible here, or the text is too long."""

    def __init__(self, target: Any, opening: Open, longest: int, vocab_size: int) -> None:
        self._opening, ids = opening, unpacked_ints(opening.ids)
        check_options(opening.options)
        if not 1 <= opening.prompt_length <= len(ids) < longest:
            raise ValueError(
                f"a text of {len(ids)} tokens came in, {opening.prompt_length} of them the prompt: this server "
                f"takes 1 to {longest - 1}"
            )
        rows, width = target.get_input_embeddings().weight.shape
        if not all(0 <= token < rows for token in ids):
            raise ValueError(f"the text holds ids that are no tokens: the target's vocabulary has {rows}")
        check_tokens(opening.options, rows)
        layers = target.config.get_text_config(decoder=True).num_hidden_layers
        self.taps = sorted(set(opening.taps))
        if any(layer > layers for layer in self.taps):
            raise ValueError(f"hidden states {self.taps} are wanted: the target has 0 to {layers}")
        self.cache = DynamicCache()  # of all tokens but the last, once the prompt was read
        self.position_bytes = 2 * width * len(self.taps)  # of a position's hidden states, packed
        if self.position_bytes > PIECE_BYTES:
            raise ValueError(f"{len(self.taps)} hidden states of a position are wanted: they do not fit into a message")
        self._ids = torch.tensor([ids], device=device_of(target))
        self.plain = opening.plain
        self._texts: Any = None  # `SeededTexts`, once the prompt was read
        self._rules = _rules(target, self._ids[:, : opening.prompt_length], opening.options, longest)
        self._draws: Draws | None = None
        self.skips = self._rules[2].do_sample and len(ids) > opening.prompt_length
        if self._rules[2].do_sample:
            generator = torch.Generator(self._ids.device).manual_seed(opening.seed)
            self._skipping = skipped_draws(generator, vocab_size, len(ids) - opening.prompt_length)
            self._draws = Draws(generator, vocab_size)

    def skip_some(self) -> bool:
        """Skips earlier draws of a text that `skips` them, for a few milliseconds; returns whether any are left."""
        return next(self._skipping, self) is not self

    @property
    def unread(self) -> torch.Tensor:
        """The tokens `[1, n]` of the prompt that have not been read."""
        return self._ids[:, self.cache.get_seq_length() :]

    def wants_taps(self, begin: int, end: int) -> slice:
        """Slice of the positions `begin` to `end` whose hidden states the device wants."""
        return slice(min(max(self._opening.taps_from - begin, 0), end - begin), None)

    @property
    def waiting(self) -> int:
        """Number of prompt tokens that have not been read."""
        return self.unread.shape[1] if self._texts is None else 0

    def most_tokens(self) -> int:
        return int(self._rules[2].max_length)

    def begin(self, logits: torch.Tensor) -> int:
        """Emits the first token, by logits `[1, V]`, and returns it."""
        processors, criteria, config = self._rules
        texts = SeededTexts(self._ids, config, processors, criteria, None, OwnChoice())
        texts.prompt_length = self._opening.prompt_length
        if self._draws is not None:
            texts.draw_by(self._draws)
        self._texts = texts
        self.advance(DraftTree.root(-1), logits)
        return texts.last_token(0)

    def advance(self, tree: DraftTree, logits: torch.Tensor) -> tuple[list[int], list[int], int]:
        """Judges a tree by its nodes' logits `[nodes, V]`, and emits what is accepted.

        Returns accepted nodes, emitted tokens, and how many of these were in the tree.
        """
        verdict = self._texts.judge(0, tree, logits)
        self._texts.emit(0, tree, verdict)
        self._texts.end_batch()
        return verdict.path, list(self._texts.rows[0].emitted), verdict.num_drafted

    @property
    def root(self) -> int:
        """The last token, which the target has not read."""
        return self._texts.last_token(0)

    @property
    def finished(self) -> bool:
        return not self._texts.active

    @property
    def reach(self) -> int:
        """Maximum depth of a draft, so that the token after it fits the text and the hidden states fit a message."""
        if self.finished:
            return 0
        room = self._texts.room(0)
        return max(min(room, PIECE_BYTES // self.position_bytes if self.position_bytes else room) - 1, 0)

    def release(self) -> None:
        self.cache = DynamicCache()


def _rules(target: Any, prompt: torch.Tensor, options: Mapping[str, Any], longest: int) -> tuple[Any, Any, Any]:
    """Processors, criteria and configuration that `generate()` makes of the options for a prompt `[1, n]`.

    Raises a ValueError if the options allow a longer text than `longest`.
    """

    def prepared(
        model: Any, input_ids: Any, logits_processor: Any, stopping_criteria: Any, generation_config: Any, **_: Any
    ) -> tuple[Any, Any, Any]:
        return logits_processor, stopping_criteria, generation_config

    mask = torch.ones_like(prompt)
    rules = target.generate(prompt, attention_mask=mask, custom_generate=prepared, **options)
    config = rules[2]
    if int(config.max_length) > longest:  # cutting it would end it differently from a local call
        raise ValueError(
            f"the text may come to have {config.max_length} tokens: this server takes at most {longest}; ask for fewer "
            "by max_new_tokens"
        )
    config.return_dict_in_generate = False
    return rules
