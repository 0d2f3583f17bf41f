"""Gathers the conversations of a plan from files and data sets, or lets the target make them."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from accelerate import PartialState
from transformers import __version__ as transformers_version

from ..._version import __version__
from ...runtime.target_loading import is_sharded
from ..loop.progress import Reporter
from .answers import Answered, answer_prompts, prompts_that_fit, row_of, store_answers
from .conversations import (
    Chat,
    Conversation,
    Message,
    Prompt,
    check_template_keeps_turns,
    prompts_from_dataset,
    read_chats,
    read_jsonl,
)
from .dataset import RowFolder
from .generating import reply
from .inventing import invent_prompts, prompt_of
from .kinds import Kind, chosen_kinds, kind_of_openings
from .overlap import PromptIndex
from .plan import INVENTED_PROMPTS, Report, TrainingPlan
from .server import PROBE_TOKENS, PROBES, answer_by_server, check_server

Asked = TypeVar("Asked", Conversation, Prompt)


_INVENTED_AT_ONCE = 1024  # prompts that a stream invents before the target answers them
_LEAST_BATCH = 16  # conversations that a stream hands over together
_NO_PROMPTS = "{} holds no prompts: expected lines with `turns` or `messages`"


def check_not_empty(path: str) -> None:
    """Raises a ValueError for a file of prompts without any line; the lines are not parsed."""
    if os.path.isfile(path):
        with open(path, "rb") as file:
            if not any(line.strip() for line in file):
                raise ValueError(_NO_PROMPTS.format(path))


def most_in_sources(plan: TrainingPlan) -> int | None:
    """Upper bound of the conversations and prompts in a plan's sources; `None` if it is unknown."""
    if (plan.dataset is not None and plan.num_prompts is None) or not all(map(os.path.isfile, plan.prompts)):
        return None
    count = plan.num_prompts or 0 if plan.dataset is not None else 0
    for path in plan.prompts:
        with open(path, "rb") as file:
            count += sum(bool(line.strip()) for line in file)
    return count


def read_sources(
    plan: TrainingPlan, seed: int, on_bad_line: Callable[[str], None] | None, report: Report
) -> tuple[list[Conversation], list[Prompt]]:
    """Reads finished conversations and prompts from the files and the data set of a plan. `seed` orders the prompts.

    Raises:
        ValueError: a file, or one that the plan excludes, holds neither; or see `read_jsonl` and
            `prompts_from_dataset`.
    """
    finished, prompts = [], []
    for path in plan.prompts:
        chats, asked = read_jsonl(path, plan.greedy_only, on_bad_line)
        if not chats and not asked:
            raise ValueError(_NO_PROMPTS.format(path))
        finished += chats
        prompts += asked
    if plan.dataset is not None:
        prompts += prompts_from_dataset(plan.dataset, plan.dataset_config, plan.dataset_split, plan.dataset_column)
    finished, prompts = leave_near_out(plan, finished, report), leave_near_out(plan, prompts, report)
    unique = {prompt.key: prompt for prompt in prompts}
    order = sorted(unique, key=lambda key: hashlib.sha256(f"{seed} {key}".encode()).hexdigest())
    return finished, [unique[key] for key in order][: plan.num_prompts]


def leave_near_out(plan: TrainingPlan, chats: list[Asked], report: Report) -> list[Asked]:
    """Leaves out near-duplicates of the prompts that the plan excludes."""
    if not plan.exclude_near:
        return chats
    judges = PromptIndex([chat.asked for path in plan.exclude_near for chat in read_chats(path)])
    kept = [chat for chat in chats if not judges.is_near(Chat.of(chat).asked)]
    if chats:
        report(f"{len(chats) - len(kept):,} of {len(chats):,} chats left out: near-duplicates of --exclude-near")
    return kept


def answer_all(
    target: Any,
    tokenizer: Any,
    plan: TrainingPlan,
    seed: int,
    identity: str,
    prompts: Sequence[Prompt],
    out: Path,
    report: Reporter,
) -> list[Conversation]:
    """Lets the target answer all prompts, and invent them first if the plan says so. Rows on disk are not made again.

    `identity` is the target's fingerprint, `out` the folder of the run.
    """
    state, limit = PartialState(), _longest_prompt(target, plan)
    recipe = recipe_of(target, tokenizer, plan, seed, identity)
    if plan.invents:
        prompts = _invented(target, tokenizer, plan, seed, recipe, limit, out, report)
    together = is_sharded(target) and plan.answers_from is None
    rows = _same_rows(state) if together else RowFolder
    store = rows(out / "data", "Chats answered by the target.", recipe, writer=state.process_index)
    done = store.keys()
    pending = [prompt for prompt in prompts if prompt.key not in done]
    if not prompts:
        return []
    state.wait_for_everyone()  # until all processes have read the same rows
    share = pending if together else pending[state.process_index :: state.num_processes]
    skipped: list[str] = []

    def skip(prompt: Prompt, why: str) -> None:
        skipped.append(why)

    share = prompts_that_fit(tokenizer, share, limit, on_skip=skip)
    expected = _own_answers(target, tokenizer) if plan.answers_from is not None and pending else None
    batches = _batches(target, tokenizer, plan, seed, share, expected, skip)
    with report.stage("answering", "prompts", len(share)) as stage:
        store_answers(batches, store, on_progress=lambda count, speed: stage.advance(count, f"{speed:,.0f} tokens/s"))
    if skipped:
        report(f"{len(skipped)} prompts left out; the reason of the first: {skipped[0]}")
    state.wait_for_everyone()
    wanted = {prompt.key for prompt in prompts}
    return [Conversation.of(row["messages"]) for row in store.rows() if row["key"] in wanted]


def stream_answers(
    target: Any,
    tokenizer: Any,
    plan: TrainingPlan,
    seed: int,
    identity: str,
    prompts: Sequence[Prompt],
    out: Path,
    report: Reporter,
) -> Iterator[list[Conversation]]:
    """As `answer_all`, but yields conversations as they come: first all that are on disk, then batch by batch.

    The target invents prompts as they are needed. Batches are in random order, so that each is much like the whole.
    """
    recipe, limit = recipe_of(target, tokenizer, plan, seed, identity), _longest_prompt(target, plan)
    store = RowFolder(out / "data", "Chats answered by the target.", recipe)
    yield [Conversation.of(row["messages"]) for row in store.rows()]
    wanted = plan.num_prompts or INVENTED_PROMPTS
    for count in range(_INVENTED_AT_ONCE, wanted + _INVENTED_AT_ONCE, _INVENTED_AT_ONCE) if plan.invents else [0]:
        if plan.invents:
            part = replace(plan, num_prompts=min(count, wanted))
            prompts = _invented(target, tokenizer, part, seed, recipe, limit, out, report)
        done = store.keys()
        pending = prompts_that_fit(
            tokenizer, [prompt for prompt in prompts if prompt.key not in done], limit, lambda prompt, why: None
        )
        expected = _own_answers(target, tokenizer) if plan.answers_from is not None and pending else None
        answers = _batches(target, tokenizer, plan, seed, pending, expected, lambda prompt, why: None, shuffled=True)
        for batch in _of_some_size(answers):
            store.append([row_of(answered) for answered in batch])
            yield [Conversation.of(answered.messages) for answered in batch]


def _of_some_size(batches: Iterable[Sequence[Answered]]) -> Iterator[list[Answered]]:
    """Joins batches until each has `_LEAST_BATCH` answers or more, the last one excepted."""
    waiting: list[Answered] = []
    for batch in batches:
        waiting += batch
        if len(waiting) >= _LEAST_BATCH:
            yield waiting
            waiting = []
    if waiting:
        yield waiting


def _longest_prompt(target: Any, plan: TrainingPlan) -> int:
    """Tokens of a first turn at most: it leaves room for an answer within `max_length`, and both fit the window."""
    limit = max(8, plan.max_length - min(plan.max_new_tokens, plan.max_length // 2))
    window = getattr(target.config.get_text_config(), "max_position_embeddings", None)
    return limit if window is None else min(limit, window - plan.max_new_tokens)


def _invented(
    target: Any,
    tokenizer: Any,
    plan: TrainingPlan,
    seed: int,
    recipe: dict[str, Any],
    limit: int,
    out: Path,
    report: Reporter,
) -> list[Prompt]:
    """Lets the target invent the prompts of a plan; `limit` is the greatest number of tokens of a first turn."""
    state, count, kinds = PartialState(), plan.num_prompts or INVENTED_PROMPTS, kinds_to_invent(plan, tokenizer)
    invented = (
        {"openings": list(plan.openings)}
        if plan.openings
        else {"kinds": {kind.name: kind.share for kind in kinds}, "max_prompt_tokens": limit}
    )
    made = _same_rows(state)(out / "prompts", "Prompts a chat model invented.", {**recipe, **invented})
    if plan.answers_from is not None and len(made.keys()) < count:  # before the work of inventing
        own = _own_answers(target, tokenizer)
        check_server(plan.answers_from, plan.server_model, _temperatures(plan), own)
    if state.is_main_process or is_sharded(target):
        with report.stage("inventing", "prompts", count, min(count, len(made.keys()))) as stage:
            invent_prompts(
                target,
                tokenizer,
                count,
                made,
                kinds,
                max_prompt_tokens=limit,
                seed=seed,
                on_batch=stage.advance,
                on_given_up=lambda name: report(f"the target invents too few prompts of kind {name}: others do"),
            )
    state.wait_for_everyone()
    prompts = leave_near_out(plan, [prompt_of(row) for row in made.rows()][:count], report)
    found = Counter(prompt.category for prompt in prompts)
    report(f"invented: {', '.join(f'{count:,} {kind}' for kind, count in found.most_common())}")
    return prompts


def _batches(
    target: Any,
    tokenizer: Any,
    plan: TrainingPlan,
    seed: int,
    prompts: Sequence[Prompt],
    expected: list[str] | None,
    skip: Callable[[Prompt, str], None],
    shuffled: bool = False,
) -> Iterable[Sequence[Answered]]:
    """Returns the answers in batches, from the plan's server or else from the target.

    `expected` are the target's answers to `PROBES`; `skip` gets each prompt that the server does not answer, and why.
    """
    common: dict[str, Any] = {"temperatures": _temperatures(plan), "max_new_tokens": plan.max_new_tokens, "seed": seed}
    if plan.answers_from is None or not prompts:
        turns: dict[str, Any] = {"batch_size": plan.answer_batch_size, "invented_turns": plan.invented_turns}
        turns["shuffled"] = shuffled
        return answer_prompts(target, tokenizer, prompts, **common, **turns)
    served: dict[str, Any] = {"model": plan.server_model, "concurrency": plan.answer_batch_size, "expected": expected}
    answers = answer_by_server(plan.answers_from, prompts, **common, **served, on_skip=skip)
    return ([answered] for answered in answers)


def kinds_to_invent(plan: TrainingPlan, tokenizer: Any) -> list[Kind]:
    """Returns the kinds of prompts to invent; a ValueError if the plan names one that is unknown or cannot be rendered.

    Kinds with several turns are left out if the template cannot render them, unless the plan names kinds.
    """
    if plan.openings:
        return [kind_of_openings(plan.openings)]
    kinds = chosen_kinds(plan.kinds)
    if any(kind.follow_ups for kind in kinds):
        try:
            check_template_keeps_turns(tokenizer)
        except ValueError:
            if plan.kinds:
                raise
            return [kind for kind in kinds if not kind.follow_ups]
    return kinds


def _own_answers(target: Any, tokenizer: Any) -> list[str]:
    """The target's greedy answers to `PROBES`. All processes of a sharded target have to take part."""
    histories: list[list[Message]] = [[{"role": "user", "content": prompt}] for prompt in PROBES]
    return [text for text, _ in reply(target, tokenizer, histories, 0.0, PROBE_TOKENS)]


class _UnwrittenRows(RowFolder):
    """Rows that another process makes too, and writes."""

    def append(self, rows: Sequence[dict[str, Any]]) -> None: ...


def _same_rows(state: PartialState) -> type[RowFolder]:
    """The class for rows that all processes make alike: only the main process writes."""
    return RowFolder if state.is_main_process else _UnwrittenRows


def _temperatures(plan: TrainingPlan) -> Sequence[float]:
    return (0.0,) if plan.greedy_only else plan.temperatures


def recipe_of(target: Any, tokenizer: Any, plan: TrainingPlan, seed: int, identity: str) -> dict[str, Any]:
    """Returns everything that decides the answers."""
    return {
        "target": identity,
        "target_name": plan.drafter.get("target_name", ""),
        "target_revision": getattr(target.config, "_commit_hash", None),
        "chat_template": hashlib.sha256(str(tokenizer.chat_template).encode()).hexdigest()[:16],
        "temperatures": list(_temperatures(plan)),
        "top_k": 0,
        "top_p": 1.0,
        "max_new_tokens": plan.max_new_tokens,
        "invented_turns": plan.invented_turns,
        "seed": seed,
        "made_with": {"hf_hsdraft": __version__, "transformers": transformers_version},
    }


def in_order(conversations: Sequence[Conversation], seed: int) -> list[Conversation]:
    """Shuffles conversations by digest, so that further conversations do not change the order of the others.

    The first conversations are held out. So a run that starts from the drafter of a run on part of the same data holds
    out no conversation that the earlier run learned from, if that run held out as many.
    """
    return sorted(conversations, key=lambda chat: hashlib.sha256(repr((seed, chat.messages)).encode()).hexdigest())
