"""What a training run learns from, what it makes, and how it learns. Nothing heavy is imported.

Each option of `hsdraft train` is declared here once, with type, default, limit, panel of the help and sentence.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, get_args, get_type_hints

import typer

from ...core.checks import demand, public_name
from ...core.methods import offered

Report = Callable[[str], None]
RUNNING, DATA, DRAFTER, LEARNING, EVALUATING, PUBLISHING = PANELS = (
    "Running", "Data", "Drafter", "Learning", "Evaluating", "Publishing",
)  # fmt: skip
INVENTED_PROMPTS, PASSES = 2000, 3  # defaults
TEMPERATURES = (0.0, 0.0, 0.7, 1.0)
_FOLDERS = {"checkpoints", "data", "features", "prompts"}  # of a run
_ADAPTER = re.compile(r"[A-Za-z0-9_-]+")
_ADAPTER_WANTED = f"expected letters, digits, '_' and '-', without 'lora', and none of {', '.join(sorted(_FOLDERS))}"


class Option(NamedTuple):
    """An option of the command; `limits` are further arguments of `typer.Option`, and `names` instead of its own.

    `type` is the field's, unless `limits` declare another for the command.
    """

    type: Any
    default: Any
    sentence: str
    panel: str
    limits: dict[str, Any]


def options_of(kind: type) -> dict[str, Option]:
    """The options that a dataclass declares, by name: `Annotated[type, sentence, panel, limits] = default`.

    A dataclass has a panel for options that name none.
    """
    found, hints = dict[str, Option](), get_type_hints(kind, include_extras=True)
    for each in fields(kind):
        if sentence_and_more := getattr(hints[each.name], "__metadata__", ()):
            sentence, *more = sentence_and_more
            panel = next((part for part in more if isinstance(part, str)), kind.panel)  # type: ignore[attr-defined]
            limits = next((part for part in more if isinstance(part, dict)), {})
            of_command = {"type": get_args(hints[each.name])[0], **limits}
            found[each.name] = Option(of_command.pop("type"), each.default, sentence, panel, of_command)
    return found


def check_limits(options: Any) -> None:
    """Raises a ValueError for an option below its least value."""
    for name, each in options_of(type(options)).items():
        least, value = each.limits.get("min"), getattr(options, name)
        if least is not None and isinstance(value, int | float) and value < least:
            raise ValueError(f"{name}={value} is invalid: expected {least} or more")


def _shares(text: str) -> dict[str, float]:
    shares: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, share = part.partition("=")
        try:
            shares[name] = float(share or 1)
        except ValueError:
            raise typer.BadParameter(f"expected names and shares such as code,summary=2, found {text!r}") from None
    return shares


def _layers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"expected layer numbers such as 3,16,28, found {text!r}") from None


_SHARES: dict[str, Any] = {"parser": _shares, "metavar": "NAME=SHARE,...", "show_default": False}
_FILES: dict[str, Any] = {"exists": True, "dir_okay": False}
_FAMILY: Any = Literal[("hidden-state", "block", "eagle3", *offered("family"))]


@dataclass(frozen=True)
class TrainingPlan:
    """What a run learns from and what it makes. `LearningOptions` say how it learns."""

    panel: ClassVar[str] = DATA
    # Folder of the run: prompts, answers, features, checkpoints and, at its top, the best drafter
    out: Annotated[str, "Folder of the run; run again to resume.", RUNNING, {"metavar": "PATH"}]
    prompts: Annotated[
        list[Path], "JSONL: `turns` to answer, or `messages`; repeat.", {"names": ["--prompts"], **_FILES}
    ] = field(default_factory=list)
    dataset: Annotated[str | None, "Prompts from a data set of the Hub or a folder."] = None
    dataset_config: Annotated[str | None, "Its configuration."] = None
    dataset_split: Annotated[str, "Its split."] = "train"
    dataset_column: Annotated[str | None, "Text, turns or chat messages; default: found."] = None
    num_prompts: Annotated[
        int | None,
        "Prompts at most. Without files and data set, prompts the target invents: 2000, or as many as "
        "--max-minutes or --stream has time for.",
        {"min": 1},
    ] = None
    kinds: Annotated[
        dict[str, float], "Of invented prompts, with shares, as code,summary=2; default: all kinds evenly.", _SHARES
    ] = field(default_factory=dict)
    openings: Annotated[
        list[str], "How invented prompts begin, for a domain, instead of kinds; repeat.", {"names": ["--opening"]}
    ] = field(default_factory=list)
    invented_turns: Annotated[int, "Further user turns the target makes up.", {"min": 0}] = 0
    answers_from: Annotated[str | None, "OpenAI-compatible server that runs the target."] = None
    server_model: Annotated[str | None, "The target's name there."] = None
    temperatures: Annotated[
        list[float],
        "Of answers, drawn from evenly; repeat. Default: 0 0 0.7 1.",
        {"names": ["--temperature"], "min": 0.0},
    ] = field(default_factory=lambda: list(TEMPERATURES))
    max_new_tokens: Annotated[int, "Tokens of an answer.", {"min": 1}] = 256
    max_length: Annotated[int, "Tokens of a conversation.", {"min": 8}] = 1024
    answer_batch_size: Annotated[int, "Prompts answered at a time.", {"min": 1}] = 64
    greedy_only: Annotated[bool, "Learn from greedy answers only."] = False
    exclude_near: Annotated[
        list[Path],
        "Prompts that will judge: leave near-duplicates out; repeat.",
        {"names": ["--exclude-near"], **_FILES},
    ] = field(default_factory=list)
    skip_bad_lines: Annotated[bool, "Report unusable lines of --prompts and leave them out."] = False
    cache_taps: Annotated[
        bool | None,
        "Keep the target's hidden states on disk, so that no step computes them; default: where a target "
        "on a CPU gives all answers.",
        RUNNING,
    ] = None
    stream: Annotated[bool, "Learn while the target still answers; each conversation --passes times.", RUNNING] = False
    passes: Annotated[int, "How often a stream learns from a conversation.", RUNNING, {"min": 1}] = PASSES
    family: Annotated[str, "Family of the drafter.", DRAFTER, {"type": _FAMILY}] = "hidden-state"
    init_from: Annotated[str | None, "Drafter to start from.", DRAFTER] = None
    lora: Annotated[
        int | None, "Train LoRA updates of this rank on --init-from instead of all weights.", DRAFTER, {"min": 1}
    ] = None
    adapter_name: Annotated[
        str | None, "Name of that LoRA adapter, saved in a folder of this name; default: none.", DRAFTER
    ] = None
    eval_conversations: Annotated[int, "Conversations held out.", EVALUATING, {"min": 1}] = 48
    eval_prompts: Annotated[int, "Held-out prompts that measure tau.", EVALUATING, {"min": 0}] = 16
    publish_data: Annotated[
        str | None, "Send the chats that the target answers to this data set of the Hub: user/name.", PUBLISHING
    ] = None
    # Fields of the drafter's configuration that differ from what its family derives from the target
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
        if self.invents:
            shares = [name if share == 1 else f"{name} x {share:g}" for name, share in self.kinds.items()]
            how = f"kinds: {', '.join(shares)}" if shares else "all kinds evenly"
            if self.openings:
                how = f"{len(self.openings)} opening{'s' * (len(self.openings) > 1)}"
            sources.append(f"invented by the target ({how})")
        turns = f", {self.invented_turns} further turns invented" if self.invented_turns else ""
        kinds = ", ".join(f"{temperature:g}" for temperature in sorted(set(self.temperatures)))
        answers = f"new answers at temperatures {kinds}, of {self.max_new_tokens} tokens at most"
        return f"{' and '.join(sources)}{turns}; {answers}"

    def check(self, processes: int) -> None:
        """Raises a ValueError if options are out of range or contradict each other, or the number of processes."""
        check_limits(self)
        if self.answers_from is not None and self.invented_turns:
            raise ValueError("a server cannot invent turns: leave --invented-turns or --answers-from out")
        for name, given in (("kinds", self.kinds), ("opening", self.openings)):
            if given and not self.invents:
                raise ValueError(f"--{name} is for invented prompts: leave it out, or --prompts and --dataset")
        if self.kinds and self.openings:
            raise ValueError("--kinds and --opening are two ways to say what the target invents: give one of them")
        self._check_adapter_name()
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


@dataclass(frozen=True)
class DrafterFields:
    """Fields of a drafter's configuration that the command has options for; `None` for what its family derives."""

    panel: ClassVar[str] = DRAFTER
    target_tap_layers: Annotated[
        list[int] | None,
        "Tapped layers, as 3,16,28; default: low, middle, high.",
        {"names": ["--taps"], "type": str, "parser": _layers, "metavar": "N,..."},
    ] = None
    draft_vocab_size: Annotated[int | None, "Default: what pays, by the answers.", {"min": 1}] = None
    num_draft_steps: Annotated[
        int | None,
        "K, depth of a draft; default 6, of block, specformer, steered-lm 8, eagle3 7, lm and self 5.",
        {"min": 1},
    ] = None
    tree_size: Annotated[
        int | None, "Nodes per round, at least K; default 24, of self and both lm 16; decides no weights.", {"min": 1}
    ] = None
    num_hidden_layers: Annotated[
        int | None, "Layers; default 1, of block drafters 3, of lm a fifth of the target's.", {"min": 1}
    ] = None
    num_roll_layers: Annotated[
        int | None, "Of hidden-state drafters: layers of a roll-out step; default: all.", {"min": 1}
    ] = None
    num_step_modules: Annotated[
        int | None, "Of hidden-state drafters: sets of parameters by step; default: 1.", {"min": 1}
    ] = None
    injector: Annotated[Literal["path", "low_rank", "selector"] | None, "Of hidden-state drafters; default: path."] = (
        None
    )
    head: Annotated[
        Literal["target", "trained"] | None, "Of hidden-state and specformer drafters; default: target."
    ] = None
    markov_rank: Annotated[
        int | None, "Of block drafters' bias by the token before; default 256, 0 for none.", {"min": 0}
    ] = None
    markov_head_type: Annotated[
        Literal["vanilla", "gated", "rnn"] | None,
        "Formula of that bias; default: vanilla.",
        {"names": ["--markov-head"]},
    ] = None
    target_name: Annotated[str | None, "Name of the target to store; default: --target.", PUBLISHING] = None


@dataclass
class LearningOptions:
    """How a run learns; `DrafterTrainingArguments` adds them to transformers' `TrainingArguments`."""

    panel: ClassVar[str] = LEARNING
    max_minutes: Annotated[float | None, "Minutes of the whole run: prompts, answers, training, saving.", RUNNING] = (
        None
    )
    max_training_minutes: Annotated[float | None, "Minutes from the first step to the saved drafter.", RUNNING] = None
    max_steps: Annotated[int, "Number of steps, where no minutes are given.", RUNNING] = 2000
    num_train_epochs: Annotated[
        float, "Passes over the conversations, where it is given and no steps are.", RUNNING
    ] = 3.0
    seed: Annotated[int, "Seed of the prompts, the answers and the training.", RUNNING] = 42
    objective: Annotated[
        str,
        "Loss between a prediction and the target: forward_kl, reverse_kl, jensen_shannon, hard_labels, "
        "total_variation, ce_tv, kl_ce, nla, lk_hybrid, ctc.",
    ] = "forward_kl"
    ce_share: Annotated[float | None, "Share of the cross-entropy in ce_tv (0.1) and kl_ce (0.5)."] = None
    data_policy: Annotated[str, "Whose tokens the chains follow: teacher, student, mixed, draft-opd."] = "teacher"
    candidates: Annotated[
        int | None,
        "Number of the target's most probable tokens that the loss compares at each position; 0 compares "
        "all. Default: 16 for large draft vocabularies where the family can.",
        {"min": 0},
    ] = None
    drawn_candidates: Annotated[int, "Number of further tokens that it compares, drawn by frequency.", {"min": 1}] = (
        1024
    )
    depth_weighting: Annotated[str, "How depths are weighted: fixed, by-prediction, d-pace."] = "fixed"
    depth_decay: Annotated[float, "Depth d weighs depth_decay ** d."] = 0.8
    depth_weights: Annotated[list[float] | None, "Weight of each depth, as 1,0.8,0.6, instead of depth_decay."] = None
    chains_per_conversation: Annotated[int, "Number of chain starts drawn from a conversation.", {"min": 1}] = 160
    rolled_fraction: Annotated[
        float,
        "Share of the chains followed beyond the first depth; of hidden-state drafters 0.2, of block, "
        "specformer and both lm 1, of self 0.05.",
    ] = 0.5
    learning_rate: Annotated[float, "Peak of the learning rate.", {"min": 0}] = 6e-4
    per_device_train_batch_size: Annotated[int, "Conversations of a step.", {"min": 1}] = 2
    gradient_accumulation_steps: Annotated[int, "Number of steps whose gradients are added up.", {"min": 1}] = 1
    bf16: Annotated[bool, "Compute the steps in bfloat16."] = False
    eval_steps: Annotated[float, "Steps between two evaluations.", EVALUATING] = 500
    per_device_eval_batch_size: Annotated[int, "Conversations evaluated at a time.", EVALUATING, {"min": 1}] = 2
    eval_new_tokens: Annotated[int, "Tokens of each held-out prompt that measure tau.", EVALUATING] = 48
    early_stopping_patience: Annotated[
        int | None, "Stop after this many evaluations without a better tau.", EVALUATING
    ] = None
    report_to: Annotated[str, "Tracker that gets the figures: tensorboard, wandb, ...", EVALUATING] = "none"
    push_to_hub: Annotated[bool, "Send the finished drafter to the Hub.", PUBLISHING] = False
    hub_model_id: Annotated[str | None, "Its repository there, as user/name.", PUBLISHING] = None
    hub_private_repo: Annotated[bool | None, "Whether that repository is private.", PUBLISHING] = None
