"""Measures what lossy verification costs and gains against plain decoding and exact drafting."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ...bench.calls import WARM_UP_TOKENS, Run, Settings, time_call, turn_order
from ...bench.systems import PLAIN, System, with_options
from ...drafters.base.draft_options import DraftOptions
from ...runtime.prompt_inputs import encode_prompts, end_tokens
from ...verify.registry import VERIFIERS
from ...verify.verdict import Verifier
from .checked_tasks import Item
from .rules import BESIDE, lossy_rule

EXACT = "exact drafting"
GREEDY, SAMPLED = "greedy", "sampled"
_NGRAM = 4  # tokens of an n-gram by which repetition is counted


@dataclass(frozen=True)
class Rule:
    """A lossy rule with its options, as a caller writes it."""

    name: str  # of `VERIFIERS`
    options: dict[str, Any] = field(default_factory=dict)  # only those set, of the rule and of `BESIDE`

    @property
    def text(self) -> str:
        """The rule as `parse` reads it."""
        return "+".join([self.name, *(f"{name}={value}" for name, value in self.options.items())])

    @property
    def drafts(self) -> dict[str, Any]:
        """The set options that concern drafts."""
        return {name: value for name, value in self.options.items() if name in BESIDE}

    @property
    def threshold(self) -> str:
        """Name of the option that controls how much is accepted."""
        return VERIFIERS[self.name].own_options[0].name

    @property
    def value(self) -> float:
        return self.options.get(self.threshold, VERIFIERS[self.name].own_options[0].default)

    @property
    def is_published(self) -> bool:
        return all(self.options.get(name, default) == default for name, default in self.defaults.items())

    @property
    def defaults(self) -> dict[str, Any]:
        """The rule's options, as published."""
        return {option.name: option.default for option in VERIFIERS[self.name].own_options}

    @property
    def all_options(self) -> dict[str, Any]:
        """All options that a drafter gets for this rule, unset ones included."""
        return {"verification": self.name, **self.defaults, **self.options}

    @classmethod
    def parse(cls, text: str) -> Rule:
        """Reads `fly` or `fly+fly_entropy=0.5+fly_window=2`; raises a ValueError as `lossy_rule`."""
        return cls(*lossy_rule(text))

    def at(self, value: float) -> Rule:
        """Returns the rule with another threshold. Raises a ValueError if that is out of range."""
        VERIFIERS[self.name].own_options[0].checked(value)
        return replace(self, options={**self.options, self.threshold: value})


def exact_name(rule: Rule) -> str:
    return "+".join([EXACT, *(f"{name}={value}" for name, value in sorted(rule.drafts.items()))])


def rules_of(texts: Sequence[str], thresholds: Sequence[float]) -> list[Rule]:
    """Returns the named rules, each as published and with each threshold; a ValueError as `Rule.parse`."""
    found: dict[tuple[Any, ...], Rule] = {}  # a threshold may equal the published one
    for each in [Rule.parse(text) for text in texts]:
        for rule in (each, *(each.at(value) for value in thresholds)):
            options = {**rule.defaults, **rule.options}
            found.setdefault((rule.name, *sorted(options.items())), rule)
    return list(found.values())


@dataclass(frozen=True)
class Answer:
    """One system's answer to one question."""

    task: str
    right: bool
    tokens: int  # new ones, the end of the text included
    forwards: int  # of the target
    seconds: float  # of the call
    relaxed: int  # tokens that the rule accepted in place of the target's choice or draw
    log_probability: float  # of the tokens under the target, summed, in nats, at temperature 1
    repeated: int  # n-grams that occurred before in the same answer
    ngrams: int
    same: bool  # whether the tokens are plain decoding's


@dataclass
class Quality:
    """All answers, by way of decoding and system; plain decoding and exact drafting come first.

    Rules with other draft options than the drafter's are accompanied by exact drafting with those options.
    """

    settings: dict[str, Any]
    rules: dict[str, Rule]  # by the name of their system
    answers: dict[str, dict[str, list[Answer]]] = field(default_factory=dict)  # in the order of the questions
    timed: bool = True  # whether the machine was quiet; otherwise speeds are left out
    drafter: str = ""  # its name, on which kept answers do not depend


def systems_of(drafter: Any, rules: Sequence[Rule], timed: bool = True) -> list[System]:
    """Returns plain decoding, exact drafting with each rule's draft options, and each rule.

    If not `timed`, drafts have a fixed size, since their cost on a busy machine says nothing. Raises a ValueError if a
    rule is impossible with this drafter.
    """
    drafts = {EXACT: dict[str, Any](), **{exact_name(rule): rule.drafts for rule in rules}}
    sizes = {} if timed else {"tree_sizing": "fixed"}
    made = [System(PLAIN)]
    for name, options in drafts.items():
        exact = {"verification": "walk", **sizes, **options}
        made.append(System(name, {"assistant_model": drafter}, drafter, exact, ours=True))
    for rule in rules:
        _verifier(drafter, rule)
        kwargs = {"assistant_model": drafter}
        made.append(System(rule.text, kwargs, drafter, {**sizes, **rule.all_options}, ours=True, exact=False))
    return made


def trained_with(drafter: Any, rules: Sequence[Rule]) -> set[str]:
    """Returns digests of the questions that a rule was trained with; a ValueError if a rule is impossible here."""
    return {each for rule in rules for each in getattr(_verifier(drafter, rule), "questions", ())}


def _verifier(drafter: Any, rule: Rule) -> Verifier:
    stored = drafter.generation_config
    with_options(drafter, rule.all_options)
    try:
        return drafter.verifier(DraftOptions.of(drafter))
    finally:
        drafter.generation_config = stored


def measure_quality(
    target: Any,
    tokenizer: Any,
    systems: Sequence[System],
    items: Sequence[Item],
    settings: Settings,
    kept: Callable[[int, Callable[[], dict[str, Answer]]], dict[str, Answer]] = lambda place, ask: ask(),
) -> dict[str, list[Answer]]:
    """Lets all systems answer all questions, in changing order in one process; returns the answers of each, in order.

    Args:
        systems: plain decoding first.
        settings: how all systems decode; the seed grows by 1 per question.
        kept: takes the place of each question and what asks it; returns the answers, asked or known.
    """
    inputs, ends = encode_prompts(target, tokenizer, [item.prompt for item in items]), end_tokens(target)

    @functools.cache
    def warm_up() -> None:
        for system in systems:
            time_call(target, inputs[0], system, replace(settings, max_new_tokens=WARM_UP_TOKENS))

    def ask(place: int) -> dict[str, Answer]:
        warm_up()
        calls: dict[str, tuple[list[int], Run]] = {}
        for system in turn_order(systems, place):
            [tokens], run = time_call(target, inputs[place], system, replace(settings, seed=settings.seed + place))
            calls[system.name] = tokens, run
        score = functools.cache(lambda text: log_probability(target, inputs[place]["input_ids"], text))
        plain, answers = calls[systems[0].name][0], {}
        for system in systems:
            tokens, run = calls[system.name]
            text = tokenizer.decode([token for token in tokens if token not in ends])
            right, same = items[place].is_right(text), tokens == plain
            answers[system.name] = _answer(items[place].task, right, same, tokens, run, score(tuple(tokens)))
        return answers

    found = [kept(place, functools.partial(ask, place)) for place in range(len(items))]
    return {system.name: [answers[system.name] for answers in found] for system in systems}


def _answer(task: str, right: bool, same: bool, tokens: Sequence[int], run: Run, log_probability: float) -> Answer:
    ngrams = [tuple(tokens[start : start + _NGRAM]) for start in range(len(tokens) - _NGRAM + 1)]
    return Answer(
        task=task,
        right=right,
        tokens=len(tokens),
        forwards=run.forwards,
        seconds=run.seconds,
        relaxed=0 if run.statistics is None else run.statistics.relaxed_tokens,
        log_probability=log_probability,
        repeated=len(ngrams) - len(set(ngrams)),
        ngrams=len(ngrams),
        same=same,
    )


@torch.inference_mode()
def log_probability(target: Any, prompt: torch.Tensor, tokens: Sequence[int]) -> float:
    """Returns the log-probability of a continuation of `prompt` `[1, length]` under the target, in nats."""
    ids = torch.cat([prompt, prompt.new_tensor([list(tokens)])], dim=1)
    logits = target(ids, use_cache=False, logits_to_keep=len(tokens) + 1).logits[0, :-1].float()
    chosen = logits.log_softmax(dim=-1).gather(-1, ids[0, -len(tokens) :, None])
    return float(chosen.double().sum())
