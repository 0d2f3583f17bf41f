"""The seam of drafting: what a call asks of a drafter, and what it tells it.

A family is one file or folder with a `Drafter` (weights and options, never the state of a call) and a `Session` (what
the drafting of one call remembers).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig

from ...core.draft_tree import DraftTree
from ...core.options import Option
from ...core.tensors import Transform
from ...trees.tree_builders import Expansion
from ...verify.foresight import Foresight
from ...verify.registry import VERIFIERS
from ...verify.verdict import Verifier
from .draft_options import MOST_NODES, DraftOptions
from .draft_reads import Read


@dataclass(frozen=True)
class Ask:
    """A draft that is wanted, of one text. Its sizes are final: a session takes none from the options.

    Attributes:
        row: index of the text in the batch.
        root: the last accepted token, which the target has not read yet.
        depth: greatest depth of a node that is of use; 0 where nothing should be drafted.
        size: greatest number of nodes beside the root.
        width: number of nodes that are expanded at a depth, for sessions that grow beams; of a chain 1.
    """

    row: int
    root: int
    depth: int
    size: int
    width: int = MOST_NODES

    @property
    def chain(self) -> bool:
        """Whether only one path may be drafted."""
        return self.width == 1


@dataclass(frozen=True)
class Accepted:
    """What the target has accepted of one text since the last news, n positions read.

    With x_i the tokens of the text, h_i is the tapped hidden state at position i, which the target has produced when
    it read x_i; its logits are for x_{i+1}.

    Attributes:
        row: index of the text in the batch.
        tokens: emitted tokens; the last is the bonus token, the next root.
        taps: `[n, taps * D]`, h_i of the positions read.
        positions: `[n]`, int64, these positions i, padding not counted.
        following: `[n]`, int64, the tokens x_{i+1}; with `embeds` the last one only.
        earlier: of a prompt's news, the last tokens before `tokens` as far as they are known.
        num_drafted: number of emitted tokens that the draft held.
        num_relaxed: number of these that a lossy rule accepted in place of the target's own tokens.
        embeds: `[n - 1, D]`, embeddings of the tokens x_{i+1} but the last, for prompts that were given so.
    """

    row: int
    tokens: list[int]
    taps: torch.Tensor
    positions: torch.Tensor
    following: torch.Tensor
    earlier: Sequence[int] = ()
    num_drafted: int = 0
    num_relaxed: int = 0
    embeds: torch.Tensor | None = None

    def next_embeds(self, embed: Transform) -> torch.Tensor:
        """Returns embeddings `[n, D]` of the tokens x_{i+1}, by `embed`, which makes those of tokens."""
        if self.embeds is None:
            return embed(self.following)
        last = embed(self.following[-1:])
        return torch.cat([self.embeds.to(last.device, last.dtype), last])

    @classmethod
    def of_tokens(cls, row: int, tokens: Sequence[int]) -> Accepted:
        """Returns news without hidden states, for sessions that read tokens alone."""
        none = torch.empty(0, dtype=torch.int64)
        return cls(row, list(tokens), torch.empty(0, 0), none, none)


@dataclass(frozen=True)
class Call:
    """One call of `generate()`, as its engine and the session of its drafter know it.

    Attributes:
        target: the model that verifies.
        rows: number of texts.
        options: drafting options of the call; a session gets what is left of them for this target.
        texts: the texts that grow, `engine.decoded_texts.DecodedTexts`; `None` where they grow elsewhere.
        runtime: the target's forwards and its cache, `runtime.target_runtime.TargetRuntime`; `None` likewise.
        synced_gpus: whether all processes have to run the same forwards.
        outlives: whether the target's cache is for more than this call.
        observers: listen to the rounds, beside those that every call has; see `engine.loop.Observer`.
        stack: closes when the call ends.
    """

    target: Any
    rows: int
    options: DraftOptions
    texts: Any = None
    runtime: Any = None
    synced_gpus: bool = False
    outlives: bool = False
    observers: Sequence[Any] = ()
    stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    @property
    def foresight(self) -> Foresight | None:
        """What is known of the draws to come; `None` where nothing is drawn."""
        return None if self.texts is None else self.texts.foresight

    @property
    def slots(self) -> int | None:
        """Number of slots of the target's cache, where that does not grow."""
        return None if self.runtime is None else self.runtime.slots.size

    @property
    def compile_config(self) -> Any:
        """By which forwards over trees are compiled; `None` if they are not."""
        return None if self.runtime is None else self.runtime.acceleration.compile_config

    def read_ahead(self, made: Callable[..., Any]) -> Any:
        """See `TargetRuntime.read_ahead`."""
        return None if self.runtime is None else self.runtime.read_ahead(made)


class Session:
    """What one call's drafting remembers; it ends with the call.

    Attributes:
        free: whether a draft takes no time worth counting. Free sessions draft first and always; others as deep as
            the pace says.
        takes_ngrams: whether n-grams of the texts may stand in front, where the option `ngram_length` asks for them.
        kind: what else the time of a draft depends on than the session's class, the target, the options and the depth;
            hashable.
        on_expansion: called with rows and what their trees grow from, if somebody listens; see
            `engine.loop.Observer.on_expansion`.
    """

    free = False
    takes_ngrams = True
    kind: tuple[Any, ...] = ()
    on_expansion: Callable[[Sequence[int], Expansion], None] | None = None

    def draft(self, asks: Sequence[Ask]) -> list[DraftTree]:
        """A tree for each ask, in their order; the root alone where there is nothing to say."""
        raise NotImplementedError

    def observe(self, news: Sequence[Accepted]) -> None:
        """Takes what was accepted; the first news are those of the prompts."""

    def keep(self, rows: Sequence[int]) -> None:
        """From here on only these texts go on; the others have ended. May be called again with fewer texts."""

    def memory(self, length: int) -> Any:
        """What a later call may go on from that continues the same single text of `length` tokens; `None` for nothing.

        It is kept on the cache of the target.
        """
        return None

    def resume(self, memory: Any, cached: int) -> None:
        """Goes on from a memory, if it is of the text whose first `cached` tokens are in the target's cache.

        Another drafter may have left it.
        """

    def end(self) -> None:
        """The call has ended well."""


class Drafter:
    """Weights, configuration and drafting options. One drafter may serve several calls at once.

    What is learnt of a drafter is kept by the object: two drafters are never taken for one, however alike. So every
    class of drafters hashes by identity, a dataclass too.

    Attributes:
        taps: indices of the target's hidden states that the drafter reads, ascending; () for none.
        num_draft_steps: greatest `num_assistant_tokens`.
        takes_tree_builders: whether its sessions can grow trees by any `tree_builder`, also by those that draw nodes.
        least_ngram_length: least `ngram_length`; 0 where the drafter can do without n-grams.
        why_not_refined: why its drafts cannot be refined by a tiny model of the target's text; empty if they can.
        own_options: options that this family has for itself. Sessions find their values in `call.options.own`.
        saved_as: formats of other projects that `save_pretrained` writes; it then takes `target_name` too.
        why_not_exported: why there are no others.
        generation_config: the drafting options.
    """

    taps: Sequence[int] = ()
    num_draft_steps: int
    takes_tree_builders: bool = False
    least_ngram_length: int = 0
    why_not_refined: str = "its depths are not drafted at once"
    own_options: Sequence[Option] = ()
    saved_as: Sequence[str] = ()
    why_not_exported: str = "no other program is known to read it"
    generation_config: GenerationConfig

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if vars(cls).get("__hash__") is None:  # a dataclass, or a class with `__eq__`, would have none
            cls.__hash__ = object.__hash__  # type: ignore[method-assign]

    def default_generation_config(self) -> GenerationConfig:
        """The drafting options where nobody says otherwise."""
        raise NotImplementedError

    def check_options(self) -> None:
        """Raises a ValueError for a drafting option that is wrong."""
        DraftOptions.of(self)

    def check_together(self, options: DraftOptions) -> None:
        """Raises a ValueError for options that are right one by one, but exclude each other in this family."""

    def taps_of(self, target: Any) -> Sequence[int]:
        """Returns the hidden states that it reads of a target: its `taps`, unless they depend on the target.

        It is asked after `check`.
        """
        return self.taps

    def check(self, target: Any) -> None:
        """Raises a DraftingRefused that names the field if this drafter was made for another target."""

    def warn_of_misfit(self, target: Any, tokenizer: Any, all_processes: bool) -> None:
        """May warn of a target that this drafter fits badly, before a call.

        Args:
            tokenizer: the target's, if the call has it.
            all_processes: whether all processes have to run the same forwards.
        """

    def session(self, call: Call) -> Session:
        """What drafts in one call."""
        raise NotImplementedError

    def reads(self, depth: int, width: int) -> Sequence[Read]:
        """What a draft of one text multiplies by; () where that takes no time worth counting.

        Args:
            depth: depth of the draft.
            width: number of nodes that are expanded at each depth.
        """
        return ()

    def export(self, form: str, folder: str | os.PathLike[str], target_name: str = "") -> None:
        """Writes the drafter in a format of another project, for programs that read it.

        Args:
            form: name of the format.
            folder: created if missing.
            target_name: name of the target to write; the one that the drafter knows by default.

        Raises:
            ValueError: the drafter cannot be written so; the message says why.
        """
        if form not in self.saved_as:
            raise ValueError(
                f"a {type(self).__name__} cannot be written in the format {form!r}: {self.why_not_exported}"
            )
        named = {"target_name": target_name} if target_name else {}
        self.save_pretrained(folder, **named)  # type: ignore[attr-defined]

    def verifier(self, options: DraftOptions) -> Verifier:
        """The rule that accepts its drafts.

        Raises:
            ValueError: the rule has learned something that does not lie beside the drafter's weights.
        """
        rule = VERIFIERS[options.verification].with_options(options.own)
        return rule.learned(getattr(self, "loaded_from", None))
