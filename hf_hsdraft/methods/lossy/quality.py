"""Measures what lossy verification costs and gains against plain decoding and exact drafting."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ...bench.calls import Settings, time_call
from ...bench.run import WARM_UP_TOKENS, turn_order
from ...bench.systems import PLAIN, System, with_options
from ...drafters.base.draft_options import DraftOptions
from ...runtime.prompt_inputs import encode_prompts, end_tokens
from ...verify.lossy_rule import Rule
from ...verify.verdict import Verifier
from .checked_tasks import Item

EXACT = "exact drafting"
GREEDY, SAMPLED = "greedy", "sampled"
_NGRAM = 4  # tokens of an n-gram by which repetition is counted


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
    """Returns digests of the questions that a rule was trained with, which would flatter it.

    Raises a ValueError if a rule is impossible with this drafter.
    """
    return {each for rule in rules for each in _verifier(drafter, rule).questions}


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
    known: Mapping[int, dict[str, Answer]] | None = None,
    tell: Callable[[int, dict[str, Answer]], None] = lambda place, answers: None,
) -> dict[str, list[Answer]]:
    """Lets all systems answer all questions, in changing order in one process; returns the answers of each, in order.

    Args:
        systems: plain decoding first.
        settings: how all systems decode; the seed grows by 1 per question.
        known: answers of an earlier run, by place of the question; these are not asked again.
        tell: called with the place of each question and its answers.
    """
    known = known or {}
    answers: dict[str, list[Answer]] = {system.name: [] for system in systems}
    inputs = encode_prompts(target, tokenizer, [item.prompt for item in items])
    for system in systems if len(known) < len(items) else ():  # warm-up
        time_call(target, inputs[0], system, replace(settings, max_new_tokens=WARM_UP_TOKENS))
    for place, item in enumerate(items):
        found = known.get(place)
        if found is None:
            seeded = replace(settings, seed=settings.seed + place)
            found = _answers_to(item, inputs[place], target, tokenizer, systems, seeded, place)
        for name, own in answers.items():
            own.append(found[name])
        tell(place, found)
    return answers


def _answers_to(
    item: Item,
    inputs: dict[str, torch.Tensor],
    target: Any,
    tokenizer: Any,
    systems: Sequence[System],
    settings: Settings,
    place: int,
) -> dict[str, Answer]:
    """The answers of all systems to a question; its place decides the order of the systems."""
    texts, runs = {}, {}
    for system in turn_order(systems, place):
        rows, runs[system.name] = time_call(target, inputs, system, settings)
        texts[system.name] = rows[0]
    scores: dict[tuple[int, ...], float] = {}
    answers = {}
    for system in systems:
        tokens, run = texts[system.name], runs[system.name]
        key = tuple(tokens)
        if key not in scores:
            scores[key] = log_probability(target, inputs["input_ids"], tokens)
        ngrams = [key[start : start + _NGRAM] for start in range(len(key) - _NGRAM + 1)]
        text = tokenizer.decode([token for token in tokens if token not in end_tokens(target)])
        answers[system.name] = Answer(
            task=item.task,
            right=item.is_right(text),
            tokens=len(tokens),
            forwards=run.forwards,
            seconds=run.seconds,
            relaxed=0 if run.statistics is None else run.statistics.relaxed_tokens,
            log_probability=scores[key],
            repeated=len(ngrams) - len(set(ngrams)),
            ngrams=len(ngrams),
            same=tokens == texts[systems[0].name],
        )
    return answers


@torch.inference_mode()
def log_probability(target: Any, prompt: torch.Tensor, tokens: Sequence[int]) -> float:
    """Returns the log-probability of a continuation of `prompt` `[1, length]` under the target, in nats."""
    ids = torch.cat([prompt, prompt.new_tensor([list(tokens)])], dim=1)
    logits = target(ids, use_cache=False, logits_to_keep=len(tokens) + 1).logits[0, :-1].float()
    chosen = logits.log_softmax(dim=-1).gather(-1, ids[0, -len(tokens) :, None])
    return float(chosen.double().sum())
