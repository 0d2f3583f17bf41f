"""What a training run learns from and what it makes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...core.checks import demand, public_name
from .answers import TEMPERATURES

Report = Callable[[str], None]
INVENTED_PROMPTS, PASSES = 2000, 3  # defaults
_FOLDERS = {"checkpoints", "data", "features", "prompts"}  # of a run
_ADAPTER = re.compile(r"[A-Za-z0-9_-]+")
_ADAPTER_WANTED = f"expected letters, digits, '_' and '-', without 'lora', and none of {', '.join(sorted(_FOLDERS))}"


@dataclass(frozen=True)
class TrainingPlan:
    """What a run learns from and what it makes. `DrafterTrainingArguments` say how it learns.

    Attributes:
        out: folder of the run: prompts, answers, features, checkpoints and, at its top, the best drafter.
        prompts: JSONL files of prompts (`turns`) or of finished conversations (`messages`).
        dataset: see `prompts_from_dataset`, as are `dataset_config`, `dataset_split` and `dataset_column`.
        num_prompts: greatest number of prompts used; number of invented prompts where no others are given.
        kinds: share of each kind of invented prompts, by its name in `kinds.KINDS`; empty for all kinds evenly.
        openings: beginnings of invented prompts, instead of kinds.
        invented_turns: number of further user turns that the target makes up in each chat it answers.
        answers_from: URL of an OpenAI-compatible server that runs the target; `None` to answer in this process.
        server_model: name of the target on that server.
        temperatures: temperatures of the answers, drawn evenly; 0 is greedy.
        max_new_tokens: greatest number of tokens of an answer.
        max_length: greatest number of tokens of a conversation. The rest is cut.
        greedy_only: whether finished conversations with a `temperature` above 0 are left out, and answers are greedy.
        answer_batch_size: number of prompts that the target answers at once.
        exclude_near: JSONL files of evaluation prompts. Training leaves out their near-duplicates, see `overlap`.
        skip_bad_lines: whether unusable lines of `prompts` are reported and left out.
        cache_taps: whether the target's hidden states are kept on disk, not computed in every step; `None` for where a
            target on a CPU gives all answers in this run, as it computes them anyway.
        stream: whether the drafter learns while the target still invents and answers prompts, see `ChatStream`.
        passes: how often a stream learns from each conversation, on average.
        eval_conversations: number of held-out conversations.
        eval_prompts: number of held-out prompts that measure tau.
        init_from: drafter to start from.
        lora: rank of the updates that are trained; `None` to train all weights.
        adapter_name: name of the adapter that LoRA trains, and of its folder in `out`; `None` for one in `out` itself.
        publish_data: data set of the Hub that the target's own chats are sent to, as user/name; `None` sends none.
        family: family of the drafter, a name in `trainable.TRAINABLE`.
        drafter: fields of its configuration that differ from what its family derives from the target.
    """

    out: str
    prompts: Sequence[str] = ()
    dataset: str | None = None
    dataset_config: str | None = None
    dataset_split: str = "train"
    dataset_column: str | None = None
    num_prompts: int | None = None
    kinds: Mapping[str, float] = field(default_factory=dict)
    openings: Sequence[str] = ()
    invented_turns: int = 0
    answers_from: str | None = None
    server_model: str | None = None
    temperatures: Sequence[float] = TEMPERATURES
    max_new_tokens: int = 256
    max_length: int = 1024
    greedy_only: bool = False
    answer_batch_size: int = 64
    exclude_near: Sequence[str] = ()
    skip_bad_lines: bool = False
    cache_taps: bool | None = None
    stream: bool = False
    passes: int = PASSES
    eval_conversations: int = 48
    eval_prompts: int = 16
    init_from: str | None = None
    lora: int | None = None
    adapter_name: str | None = None
    publish_data: str | None = None
    family: str = "hidden-state"
    drafter: dict[str, Any] = field(default_factory=dict)

    @property
    def invents(self) -> bool:
        """Whether the target makes up the prompts."""
        return not self.prompts and self.dataset is None

    @property
    def results(self) -> Path:
        """The folder of what the run makes; PEFT saves an adapter in a folder of its name."""
        named = self.adapter_name not in (None, "default")
        return Path(self.out, self.adapter_name) if named else Path(self.out)  # type: ignore[arg-type]

    def describe_prompts(self) -> str:
        """Says where prompts and answers come from, without names of files."""
        files = f"{len(self.prompts)} file{'s' * (len(self.prompts) > 1)} of prompts or conversations"
        sources = [files] if self.prompts else []
        sources += [f"the data set {public_name(self.dataset)}"] if self.dataset is not None else []
        sources += [f"invented by the target ({self._invented()})"] if self.invents else []
        turns = f", {self.invented_turns} further turns invented" if self.invented_turns else ""
        kinds = ", ".join(f"{temperature:g}" for temperature in sorted(set(self.temperatures)))
        answers = f"new answers at temperatures {kinds}, of {self.max_new_tokens} tokens at most"
        return f"{' and '.join(sources)}{turns}; {answers}"

    def _invented(self) -> str:
        if self.openings:
            return f"{len(self.openings)} opening{'s' * (len(self.openings) > 1)}"
        shares = [name if share == 1 else f"{name} x {share:g}" for name, share in self.kinds.items()]
        return f"kinds: {', '.join(shares)}" if shares else "all kinds evenly"

    def check(self, processes: int) -> None:
        """Raises a ValueError if options contradict each other, or the number of processes."""
        if self.answers_from is not None and self.invented_turns:
            raise ValueError("a server cannot invent turns: leave --invented-turns or --answers-from out")
        for name, given in (("kinds", self.kinds), ("opening", self.openings)):
            if given and not self.invents:
                raise ValueError(f"--{name} is for invented prompts: leave it out, or --prompts and --dataset")
        if self.kinds and self.openings:
            raise ValueError("--kinds and --opening are two ways to say what the target invents: give one of them")
        self._check_adapter_name()
        if self.passes < 1:
            raise ValueError(f"passes={self.passes} is invalid: expected 1 or more")
        if self.passes != PASSES and not self.stream:
            raise ValueError("--passes is for streams: give --stream too, or --num-train-epochs instead")
        if self.stream and processes > 1:
            raise ValueError("--stream takes one process: leave it out, or start without `accelerate launch`")

    def _check_adapter_name(self) -> None:
        name = self.adapter_name
        if name is not None and self.lora is None:
            raise ValueError(f"adapter_name={name!r} names what LoRA trains: give --lora too, or leave it out")
        valid = name is None or (_ADAPTER.fullmatch(name) and "lora" not in name and name not in _FOLDERS)
        demand(bool(valid), "adapter_name", name, _ADAPTER_WANTED)
        from torch import nn

        taken = name is not None and hasattr(nn.ModuleDict(), name)  # PEFT keeps adapters in a ModuleDict by name
        demand(not taken, "adapter_name", name, "expected a name that is no attribute of torch.nn.ModuleDict")

    def check_publishes(self, prompts: int) -> None:
        """Raises a ValueError if chats are to be published and the target answers none of the `prompts` given."""
        if self.publish_data is not None and not (prompts or self.invents):
            raise ValueError(
                "--publish-data sends the chats that the target answers, but all conversations are given with their "
                "answers (`messages`): leave the option out, or give prompts (`turns`)"
            )

    def check_amount(self, count: int) -> None:
        """Raises a ValueError if `count` conversations and prompts, invented ones included, are too few."""
        if self.invents:
            count = max(count, self.num_prompts or INVENTED_PROMPTS)
        if count <= self.eval_conversations:
            raise ValueError(
                f"{count} conversations and prompts are too few: {self.eval_conversations} of them are held out; give "
                "more, or hold out fewer (--eval-conversations)"
            )
