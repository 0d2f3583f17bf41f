"""A remote target: its `generate()` drafts here and verifies there ("SLED", 2506.09397)."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig

from ..core.checks import demand, is_integer, short
from ..core.forks import new_lock
from ..core.refusals import DraftingRefused
from ..core.statistics import DraftStatistics
from ..drafters.base.draft_options import DraftOptions, adapted, option_names
from ..drafters.base.protocol import Call, Drafter
from ..engine.decoding import check_drafter, told_of_class
from ..engine.drafting import history_for
from ..engine.loop import Keeper
from ..verify.registry import VERIFIERS
from .link import Address, LinkPool
from .messages import Decode, Encode, Open, RowData, Rows, Text, Tokens, packed_ints, unpacked_ints
from .remote_target import LinkStatistics, RemoteTarget, Streaming, decode_rounds
from .verified_text import check_options
from .weight_tables import TargetShell, kept_tables
from .wire import MOST_TEXT


@dataclass
class RemoteOutput:
    """What a call returns with `return_dict_in_generate`.

    Attributes:
        sequences: `[1, length]`, prompt and new tokens.
        statistics: of the drafting; verification times include the round trip.
        seed: of the sampling; the same seed samples the same text.
    """

    sequences: torch.Tensor
    statistics: DraftStatistics
    link: LinkStatistics
    seed: int


class RemoteModel:
    """A remote target, made by `connect`. Threads may share it: each call has its own connection."""

    def __init__(self, address: Address, patience: float = 60.0, timeout: float = 60.0) -> None:
        self._links = LinkPool(address, patience, timeout)
        self._hello = self._links.hello
        self._shell = TargetShell(self._hello)
        self._loading, self._with_rows = new_lock(), dict[torch.device, TargetShell]()

    @property
    def config(self) -> Any:
        return self._shell.config

    def generate(
        self,
        inputs: str | torch.Tensor | Sequence[int] | None = None,
        assistant_model: Drafter | None = None,
        *,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        chat: bool = False,
        seed: int | None = None,
        most_taps: int | None = None,
        streamer: Any = None,
        return_dict_in_generate: bool = False,
        **options: Any,
    ) -> torch.Tensor | RemoteOutput:
        """Decodes one text: the drafter proposes here, the target verifies there. The output is the target's own.

        Args:
            inputs: a prompt as text, which the server encodes, or its tokens `[1, length]`.
            assistant_model: the drafter; without one the server decodes by itself and sends the tokens.
            input_ids: `[1, length]`, instead of `inputs`.
            attention_mask: `[1, length]`, accepted so that `generate(**encoding)` works; must not mask anything.
            chat: whether to format a text prompt as a user message by the target's chat template.
            seed: of the sampling, 0 to 2**63 - 1. The output is that of a local call after `torch.manual_seed(seed)`.
            most_taps: number of last prompt positions whose hidden states are fetched for the drafter; `None` for all.
                Fewer save bytes, but may lower acceptance.
            streamer: gets the prompt, and then the tokens of each round.
            return_dict_in_generate: whether to return statistics too.
            options: of `generate()`; `OPTIONS` in `verified_text` lists those allowed.

        Returns:
            `[1, length]`, int64, prompt and new tokens; or a [`RemoteOutput`].

        Raises:
            DraftingRefused: the drafter does not fit the target, or cannot draft over a connection.
            LinkLost: the connection was lost for longer than the patience.
            ServerRefused: the server refuses; `retry_seconds` says when to retry.
            ValueError: an argument is wrong.
        """
        _check_call(assistant_model, seed, most_taps, options)
        ids = self._ids(inputs if input_ids is None else input_ids, attention_mask, chat)
        new, longest = options.get("max_new_tokens"), self._hello.longest
        if (most := len(ids) + (new if isinstance(new, int) else 1)) > longest:
            raise ValueError(
                f"a prompt of {len(ids)} tokens may become a text of {most}: this server takes at most {longest}"
            )
        seed = secrets.randbits(63) if seed is None else seed
        draft, taps = self._prepared(assistant_model, options)
        drafter = assistant_model if draft is None else adapted(assistant_model, draft.options.adapter_name)
        taps_from = 0 if most_taps is None else max(len(ids) - most_taps, 0)
        opening = Open(packed_ints(ids), len(ids), seed, draft is None, options, taps, taps_from)
        target = RemoteTarget(self._links, opening, None if draft is None else draft.options, self._hello.width)
        statistics = self._decode(target, drafter, draft, ids, streamer)
        sequences = torch.tensor([target.tokens])
        if return_dict_in_generate:
            return RemoteOutput(sequences, statistics, target.statistics, seed)
        return sequences

    def _decode(
        self, target: RemoteTarget, drafter: Drafter | None, draft: Call | None, ids: list[int], streamer: Any
    ) -> DraftStatistics:
        name = "none" if drafter is None else type(drafter).__name__
        statistics = DraftStatistics(drafter=name, target=f"{self._hello.target}, remote")
        keeper = Keeper(statistics, torch.device("cpu"), timed=True)
        if streamer is not None:
            streamer.put(torch.tensor([ids]))
        try:
            observers = [] if streamer is None else [Streaming(streamer)]
            decode_rounds(target, drafter, draft, keeper, observers)
        finally:
            link = target.end()
            if link is not None:
                self._links.give_back(link)
        if draft is not None and draft.history is not None:
            draft.history.remember([(ids, target.tokens[len(ids) :])])
        keeper.finish()
        statistics.new_tokens = len(target.tokens) - len(ids)
        if streamer is not None:
            streamer.end()
        return statistics

    def _prepared(self, drafter: Drafter | None, options: dict[str, Any]) -> tuple[Call | None, list[int]]:
        """The drafter's call, and the layers whose hidden states it reads."""
        if drafter is None:
            return None, []
        check_drafter(drafter, self._shell)
        asked = {name: options[name] for name in ("do_sample", "temperature") if name in options}
        draft = DraftOptions.of(drafter, GenerationConfig(**asked))
        taps = sorted(drafter.taps_of(self._shell))
        # Drafters that read hidden states borrow the target's rows.
        shell = self._shell_on(getattr(drafter, "device", torch.device("cpu"))) if taps else self._shell
        return Call(shell, 1, draft, history=history_for(drafter, self._shell, draft)), taps

    def _shell_on(self, device: torch.device) -> TargetShell:
        """The target with the rows that drafters on a device borrow."""
        with self._loading:
            if device not in self._with_rows:
                self._with_rows[device] = TargetShell(self._hello, kept_tables(self._hello, self._fetch), device)
            return self._with_rows[device]

    def _ids(self, inputs: Any, mask: torch.Tensor | None, chat: bool) -> list[int]:
        """The tokens of a prompt; raises a ValueError unless there is exactly one."""
        if isinstance(inputs, str):
            if len(inputs.encode()) > MOST_TEXT:
                raise ValueError(
                    f"the prompt has {len(inputs.encode())} bytes: at most {MOST_TEXT} can be sent as text"
                )
            return self._links.ask(lambda link: unpacked_ints(link.ask(Encode(inputs, chat), Tokens).ids))
        if inputs is None:
            raise ValueError("there is no prompt: give a text, or input_ids")
        ids = _tensor(inputs)
        ids = ids[None] if ids.dim() == 1 else ids
        if ids.dim() != 2 or len(ids) != 1 or not ids.shape[1] or ids.is_floating_point():
            raise ValueError(
                f"input_ids {tuple(ids.shape)} is invalid: expected one text, [1, length]; call generate() for each "
                "from a separate thread, and the server verifies them together"
            )
        if mask is not None and not bool(torch.as_tensor(mask).all()):
            raise ValueError("attention_mask masks tokens of the prompt: leave padding out")
        return ids[0].tolist()

    def decode(self, ids: torch.Tensor | Sequence[int]) -> str:
        """Returns the text of tokens `[length]`, without special tokens, by the server's tokenizer.

        Raises a ValueError if they are not integers, or more than a text of this server has.
        """
        tokens = _tensor(ids).flatten().tolist()
        if not all(map(is_integer, tokens)):
            raise ValueError(f"{short(tokens)} are no token ids: expected integers")
        if len(tokens) > self._hello.longest:
            raise ValueError(f"{len(tokens)} tokens are too many: this server takes at most {self._hello.longest}")
        packed = packed_ints(tokens)
        return self._links.ask(lambda link: link.ask(Decode(packed), Text).text)

    def _fetch(self, table: int, first: int, count: int) -> bytes:
        return self._links.ask(lambda link: link.ask(Rows(table, first, count), RowData).states)

    def close(self) -> None:
        self._links.close()

    def __enter__(self) -> RemoteModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _tensor(ids: Any) -> torch.Tensor:
    """Token ids as a tensor; raises a ValueError for anything else, such as several texts."""
    try:
        return torch.as_tensor(ids)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(
            f"{short(ids)} is no prompt: expected one text, or the tokens of one, [1, length]; call generate() for "
            "each of several texts from a separate thread, and the server verifies them together"
        ) from None


def _check_call(drafter: Any, seed: Any, most_taps: Any, options: Mapping[str, Any]) -> None:
    """Raises an error for invalid arguments, before anything is sent."""
    if isinstance(drafter, type):
        raise ValueError(f"assistant_model={told_of_class(drafter)}")
    if drafter is not None and not isinstance(drafter, Drafter):
        raise ValueError(
            f"assistant_model is a {type(drafter).__name__}: expected a drafter of this package; "
            "AutoDrafter.from_pretrained loads one by its name"
        )
    for name in options if drafter is not None else ():
        if name in option_names(drafter):
            raise ValueError(f"{name!r} is an option of the drafter: set drafter.generation_config.{name}")
    check_options(options)
    rule = getattr(getattr(drafter, "generation_config", None), "verification", None)
    if isinstance(rule, str) and rule in VERIFIERS and rule != "walk":
        raise DraftingRefused(
            f"verification={rule!r} is not possible with a remote target: the server chooses each token by the target "
            "alone, as verification='walk' does"
        )
    positive, in_range = is_integer(most_taps) and most_taps > 0, is_integer(seed) and 0 <= seed < 2**63
    wanted = "expected a positive number, or None for all positions"
    demand(most_taps is None or positive, "most_taps", most_taps, wanted)
    demand(seed is None or in_range, "seed", seed, "expected an integer from 0 to 2**63 - 1")
