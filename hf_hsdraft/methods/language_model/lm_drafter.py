"""A small language model as drafter: its session, loading, saving, and use in `generate()`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig

from ...core.checks import is_integer, printable, short
from ...core.draft_tree import DraftTree, Expansion
from ...core.refusals import DraftingRefused
from ...core.tensors import device_of, on_device
from ...drafters.base.draft_options import DraftOptions, default_options, option_names
from ...drafters.base.plain_config import AnyTarget
from ...drafters.base.protocol import Accepted, Ask, Call, weights_of
from ...drafters.base.saved_drafter import SavedDrafter, refuse_unknown, take_options, write_options
from ...drafters.base.tree_session import CacheMemory, ParallelExpansion, TreeSession
from ...runtime.target_limits import decoder_layers, text_config
from ...runtime.tree_reading import AttentionKind
from ..estimate.reads import Read
from ..published.checkpoint import AnyCheckpoint
from ..published.formats import Format, register_format
from ..published.levels import LevelExpansion
from .lm_files import (
    DRAFTING_OPTIONS,
    describe,
    empty_model,
    fit,
    load_model,
    load_tokenizer,
    why_no_causal_lm,
    why_not_by_config,
)  # fmt: skip
from .lm_texts import LMTexts, ability_of, groups_of_rows, kind_of, shared_tokens, what_differs


@dataclass(frozen=True)
class LMLevels:
    """The `Levels` of a language model. A node's state is its column in the draft; roots have none."""

    texts: LMTexts  # have read the accepted tokens, including the roots
    first: torch.Tensor  # `[B, 1, V]`, logits after the roots
    vocab_size: int  # only this many first columns of the logits may be drafted

    def __call__(
        self, level: int, tokens: torch.Tensor, states: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if states is None:
            self.texts.forget()  # evaluated again
            logits, columns = self.first, tokens
        else:
            logits, columns = self.texts.read_nodes(level - 1, tokens, states[..., 0] if level > 2 else None)
        return logits[..., : self.vocab_size], columns[..., None]


@dataclass(frozen=True)
class LMMemory(CacheMemory):
    """What a language model has read. Copy `texts` before use."""

    texts: LMTexts | None = None


@dataclass
class _Text:
    """A row of the call."""

    tokens: list[int] = field(default_factory=list)  # all known tokens, including the root
    lost: bool = False  # holds a token that the model does not know; nothing more is drafted for it


class CausalLMSession(TreeSession):
    """Drafts trees, or chains, token by token with a language model.

    Args:
        vocab_size: number of tokens that both model and target know.
        kinds: attention types whose masks the model respects; if empty, it drafts only chains, one row at a time.
    """

    def __init__(self, model: Any, call: Call, vocab_size: int, kinds: Sequence[AttentionKind]) -> None:
        super().__init__(call.options, torch.arange(vocab_size, device=device_of(model)), call.foresight)
        self._model, self._vocab_size = model, vocab_size
        self.kind = kind_of(model)
        self._texts = [_Text() for _ in range(call.rows)]
        self._kinds = kinds
        self._groups = [self._begin(group) for group in groups_of_rows(call.rows, kinds)]
        self._resumed: LMMemory | None = None

    def _begin(self, rows: Sequence[int]) -> LMTexts:
        return LMTexts(self._model, rows, self._kinds, self._most_drafted)

    @property
    def _most_drafted(self) -> int:
        """Most drafted tokens of a row in the model's cache."""
        return max(self._options.depth * self._options.beam_width, self._options.tree_size)

    def draft(self, asks: Sequence[Ask]) -> list[DraftTree]:
        trees = {ask.row: DraftTree.root(ask.root) for ask in asks}
        wanted = {ask.row: ask for ask in asks if ask.depth > 0 and self._knows(ask)}
        for texts in self._groups:
            texts.take_back([self._texts[row].tokens for row in texts.rows], [1] * len(texts.rows))
            depths = self._depths(texts, wanted)
            if depths:
                trees.update(self._of_group(texts, depths, next(iter(wanted.values()))))
        return list(trees.values())

    def observe(self, news: Sequence[Accepted]) -> None:
        for each in news:
            text = self._texts[each.row]
            new = [*each.earlier, *each.tokens]
            text.tokens += new
            text.lost |= not all(0 <= token < self._vocab_size for token in new)
        memory, self._resumed = self._resumed, None
        if memory is not None and memory.texts is not None:
            [tokens] = memory.texts.tokens
            if self._texts[0].tokens[: len(tokens)] == tokens:
                self._groups = [memory.texts.copied()]

    def keep(self, rows: Sequence[int]) -> None:
        for texts in self._groups:
            texts.keep(rows)
        self._groups = [texts for texts in self._groups if texts.rows]

    def memory(self, length: int) -> LMMemory | None:
        if len(self._texts) > 1 or not self._groups or self._texts[0].lost:
            return None
        return LMMemory(self._groups[0])

    def resume(self, memory: Any, cached: int) -> None:
        """Continues from a memory, once the sequence is known to begin as the one that was read."""
        texts = memory.texts if isinstance(memory, LMMemory) else None
        alike = [type(texts)] == [type(group) for group in self._groups]  # only if it was read in the same way
        if alike and texts is not None and texts.fits(self._model, self._most_drafted):
            self._resumed = memory

    def _knows(self, ask: Ask) -> bool:
        text = self._texts[ask.row]
        return not text.lost and bool(text.tokens) and text.tokens[-1] == ask.root

    def _depths(self, texts: LMTexts, wanted: dict[int, Ask]) -> dict[int, int]:
        """Draft depth of each row: as wanted, limited by the model's positions."""
        depths = {}
        for place, row in enumerate(texts.rows):
            if row in wanted:
                unread = len(self._texts[row].tokens) - texts.kept[place]
                depth = min(wanted[row].depth, texts.room(place) - unread + 1)
                if depth > 0:
                    depths[row] = depth
        return depths

    def _of_group(self, texts: LMTexts, depths: dict[int, int], ask: Ask) -> dict[int, DraftTree]:
        """The trees of some rows of a group; the others are in each forward too, without new tokens or a tree."""
        options = self.options_for(ask, trees=bool(self._kinds))
        tokens = [
            self._texts[row].tokens[kept:] if row in depths else []
            for row, kept in zip(texts.rows, texts.kept, strict=True)
        ]
        depth = max(depths.values())
        all_asks = [Ask(row, self._texts[row].tokens[-1], depths.get(row, depth), 0) for row in texts.rows]
        first = texts.read(tokens)
        try:
            self._vocab_ids = self._vocab_ids.to(first.device)  # the last device of a split model
            levels, race = LMLevels(texts, first, self._vocab_size), self.race(texts.rows, depth)
            expansion = LevelExpansion(levels, depth, options.temperature, race)
            trees = self.grown(all_asks, expansion, options)
        finally:
            texts.forget()
        return {row: tree for row, tree in zip(texts.rows, trees, strict=True) if row in depths}

    def repeatable(self, asks: Sequence[Ask], expansion: Any, options: DraftOptions) -> Expansion:
        apart = replace(expansion.levels, texts=expansion.levels.texts.copied())  # drafts are dropped after each round
        return replace(expansion, levels=apart)


class ParallelLMSession(CausalLMSession):
    """Drafts all depths in one forward: behind a text stands a mask token for each further depth ("PARD", section 3).

    Nothing depends on the path, so trees cost no forwards, whatever masks the model respects.
    """

    def __init__(self, model: Any, call: Call, vocab_size: int, kinds: Sequence[AttentionKind], mask: int) -> None:
        super().__init__(model, call, vocab_size, kinds)
        self._mask = mask

    def _of_group(self, texts: LMTexts, depths: dict[int, int], ask: Ask) -> dict[int, DraftTree]:
        options, depth = self.options_for(ask), max(depths.values())
        known, each = [self._texts[row].tokens for row in texts.rows], [depths.get(row, 0) for row in texts.rows]
        inputs = [
            [*text[kept:], *[self._mask] * (count - 1)] if count else []
            for text, kept, count in zip(known, texts.kept, each, strict=True)
        ]
        logits = texts.read(inputs, depth)[..., : self._vocab_size]
        texts.take_back(known, [0] * len(known))  # the masks
        # A row's outputs are the last ones, as many as its depth.
        columns = [[min(depth - count + index, depth - 1) for index in range(depth)] for count in each]
        places = on_device(columns, logits.device)[..., None].expand(-1, -1, logits.shape[-1])
        self._vocab_ids = self._vocab_ids.to(logits.device)
        race = self.race(texts.rows, depth)
        expansion = ParallelExpansion(logits.gather(1, places), temperature=options.temperature, race=race)
        all_asks = [Ask(row, self._texts[row].tokens[-1], depths.get(row, depth), 0) for row in texts.rows]
        trees = self.grown(all_asks, expansion, options)
        return {row: tree for row, tree in zip(texts.rows, trees, strict=True) if row in depths}

    def repeatable(self, asks: Sequence[Ask], expansion: Any, options: DraftOptions) -> Expansion:
        return TreeSession.repeatable(self, asks, expansion, options)


class ModelDrafter(nn.Module, SavedDrafter):
    """A drafter that is a model of transformers in files that transformers reads too."""

    has_card = False
    num_draft_steps = 32
    takes_tree_builders = True

    def __init__(self, model: Any, tokenizer: Any = None) -> None:
        super().__init__()
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"model={type(model).__name__} is invalid: expected a causal language model; "
                "CausalLMDrafter.from_pretrained(name) loads one"
            )
        self.model: Any = model
        self.tokenizer = tokenizer
        self.config: Any = AnyTarget()  # only ids in both vocabularies are drafted
        self.generation_config = self.default_generation_config()

    @classmethod
    def why_not(cls, checkpoint: AnyCheckpoint) -> str:
        """Returns what a checkpoint is not; "" if it is such a drafter."""
        reason = why_no_causal_lm(checkpoint)
        return f"no causal language model: {reason}" if reason else ""

    @classmethod
    def of_checkpoint(cls, checkpoint: AnyCheckpoint, **kwargs: Any) -> Any:
        """As in `SavedDrafter`; takes arguments of `AutoModelForCausalLM.from_pretrained` too."""
        if reason := cls.why_not(checkpoint):
            raise ValueError(f"{printable(checkpoint.name)} holds {reason}")
        known = option_names() | {option.name for option in cls.own_options}
        refuse_unknown(cls.__name__, kwargs, known, others=True)  # others go to transformers
        own = {name: kwargs.pop(name) for name in known & kwargs.keys()}
        drafter = cls(empty_model(checkpoint, **kwargs), load_tokenizer(checkpoint))
        take_options(drafter, checkpoint.also(DRAFTING_OPTIONS), own, DRAFTING_OPTIONS)
        drafter.check_options()
        drafter.model = load_model(checkpoint, **kwargs)
        return drafter

    def save_files(self, folder: Path, **kwargs: Any) -> None:
        """Saves the model, its tokenizer, and the drafting options in a separate file.

        `AutoModelForCausalLM` can load the folder too. `kwargs` go to the model; an invalid option raises a ValueError.
        """
        self.check_options()
        self.model.save_pretrained(folder, **kwargs)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(folder)
        write_options(self.generation_config, folder, DRAFTING_OPTIONS)

    @property
    def device(self) -> torch.device:
        return device_of(self.model)

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    def default_generation_config(self) -> GenerationConfig:
        return default_options(num_assistant_tokens=5, tree_size=16, beam_width=4, own=self.own_options)

    def check_mode(self) -> None:
        """Raises DraftingRefused if the model is in training mode."""
        if self.model.training:
            raise DraftingRefused(
                "this model is in training mode, where dropout changes its drafts and takes the call's random numbers: "
                "call drafter.eval()"
            )

    def warn_of_misfit(self, target: Any, tokenizer: Any, all_processes: bool) -> None:
        """Raises DraftingRefused if both tokenizers are known and their ids stand for different tokens."""
        if self.tokenizer is None or tokenizer is None:
            return
        reason = what_differs(self.tokenizer, tokenizer)
        if reason:
            raise DraftingRefused(
                f"this drafter's tokenizer is not the target's: {reason}. Use a drafter with the target's tokenizer."
            )


class CausalLMDrafter(ModelDrafter):
    """Drafts trees ("SpecInfer") with a smaller language model that has the target's tokenizer ("Fast Inference from
    Transformers via Speculative Decoding").

        out = model.generate(**inputs, assistant_model=CausalLMDrafter(small_model))

    Passing the bare model, `assistant_model=small_model`, is transformers' assisted decoding. A model whose
    configuration names a mask token (`pard_token`) drafts all depths in one forward ("PARD").

    Args:
        model: a causal language model, used as it is. It may serve as a target too.
        tokenizer: the model's; compared with the target's if a call has that.

    Raises:
        TypeError: `model` is not a module.
        ValueError: the mask token is none of the model's.
    """

    @property
    def mask_token_id(self) -> int | None:
        """The token that stands for tokens not drafted yet (PARD); None for models that draft one after another."""
        return _mask_token_of(self.model)

    def default_generation_config(self) -> GenerationConfig:
        if self.mask_token_id is None:
            return super().default_generation_config()
        return default_options(num_assistant_tokens=8, tree_size=24, beam_width=8, own=self.own_options)

    def check(self, target: Any) -> None:
        self.check_mode()
        reason = ability_of(self.model).reason
        if reason:
            raise DraftingRefused(f"this model cannot draft: {reason}")

    def reads(self, depth: int, width: int) -> Iterator[Read]:
        """Weights that a language model reads."""
        model = self.model
        table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        untied = 0 if head is table else table.numel()
        times, rows = (depth, width) if self.mask_token_id is None else (1, depth)
        yield Read("layers", weights_of(model) - head.numel() - untied, times, rows)
        yield Read("head", head.numel(), times, rows)
        if untied:  # in memory, but only a few rows are read
            yield Read("embedding", untied, 0, 1)

    def numbers_kept(self, length: int) -> int:
        """Number of keys and values that it keeps of a whole text of `length` tokens."""
        config = text_config(self.model)
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return int(2 * decoder_layers(config) * heads * head_dim * length)

    def session(self, call: Call) -> CausalLMSession:
        shared, kinds = shared_tokens(self.model, call.target), ability_of(self.model).kinds
        if self.mask_token_id is None:
            return CausalLMSession(self.model, call, shared, kinds)
        return ParallelLMSession(self.model, call, shared, kinds, self.mask_token_id)


def _mask_token_of(model: Any) -> int | None:
    """Returns `pard_token` of a model's configuration; a ValueError if it is no token of the model."""
    is_known = hasattr(getattr(model, "config", None), "get_text_config")
    config: Any = text_config(model) if is_known else None
    mask = getattr(config, "pard_token", None)
    if mask is not None and not (is_integer(mask) and 0 <= mask < config.vocab_size):
        raise ValueError(
            f"pard_token={short(mask)} in the model's configuration is invalid: expected a token id below "
            f"vocab_size={config.vocab_size}"
        )
    return mask


# Matched last: it is recognised only by not being another format.
register_format(
    Format(
        name="causal language model",
        rank=1000,
        matches=lambda checkpoint: not why_no_causal_lm(checkpoint),
        load=CausalLMDrafter.of_checkpoint,
        describe=describe,
        drafter=CausalLMDrafter,
        possible=lambda config: not why_not_by_config(config),
        listed=lambda checkpoint: (checkpoint.folder / DRAFTING_OPTIONS).is_file(),  # most models are not drafters
        fit=fit,
    )
)
