"""Gathers the conversations of a plan from files and data sets, or lets the target make them."""

from __future__ import annotations

import functools
import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from accelerate import PartialState
from transformers import __version__ as transformers_version

from ..._version import __version__
from ...runtime.target_loading import is_sharded
from ..loop.progress import Reporter
from .answers import Answered, OnSkip, answer_prompts, prompts_that_fit, row_of, store_answers
from .conversations import (
    Chat,
    Conversation,
    Message,
    Prompt,
    check_template_keeps_turns,
    prompts_from_dataset,
    read_chats,
    read_jsonl,
    render,
    tokenize_conversation,
)
from .dataset import RowFolder
from .features import FeatureCache
from .generating import Reply, reply
from .inventing import invent_prompts, prompt_of, shortage
from .kinds import Kind, chosen_kinds, kind_of_openings
from .overlap import PromptIndex
from .plan import INVENTED_PROMPTS, Report, TrainingPlan
from .recording import TapRecorder, can_record
from .server import PROBE_TOKENS, PROBES, answer_by_server, check_server

Asked = TypeVar("Asked", Conversation, Prompt)

_FEW_KINDS = 4  # with at most so many kinds, a stream invents a full batch of each even in little time
_LOCAL_BATCH = 64  # most prompts invented at a time where a server answers
_DOCUMENT = "document"  # category of chats in which the target wrote a document for a prompt
_ENDLESS = 10**6  # prompts of a stream, unless the plan says how many
_LEAST_BATCH = 16  # conversations that a stream hands over together
_PART = 1024  # prompts given to a stream that it looks at together, before it answers the first
_NO_PROMPTS = "{} holds no prompts: expected lines with `turns` or `messages`"


def most_in_sources(plan: TrainingPlan) -> int | None:
    """Upper bound of the conversations and prompts in a plan's sources, without parsing lines; `None` if unknown.

    A file without any line is a ValueError.
    """
    count = plan.num_prompts or 0 if plan.dataset is not None else 0
    for path in filter(os.path.isfile, plan.prompts):
        with open(path, "rb") as file:
            lines = sum(bool(line.strip()) for line in file)
        if not lines:
            raise ValueError(_NO_PROMPTS.format(path))
        count += lines
    unknown = plan.dataset is not None and plan.num_prompts is None
    return None if unknown or not all(map(os.path.isfile, plan.prompts)) else count


def read_sources(
    plan: TrainingPlan, tokenizer: Any, seed: int, on_bad_line: Callable[[str], None] | None, report: Report
) -> tuple[list[Conversation], list[Prompt]]:
    """Reads finished conversations and prompts from the files and the data set of a plan. `seed` orders the prompts.

    Raises:
        ValueError: a file, or one that the plan excludes, holds neither; the tokenizer's template cannot render a
            conversation; or see `read_jsonl` and `prompts_from_dataset`.
    """
    finished, prompts = [], []
    for path in plan.prompts:
        chats, asked = read_jsonl(path, plan.greedy_only, on_bad_line, functools.partial(render, tokenizer))
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


def _judges_of(plan: TrainingPlan) -> PromptIndex:
    """Returns the prompts that a plan excludes."""
    return PromptIndex([chat.asked for path in plan.exclude_near for chat in read_chats(path)])


def leave_near_out(plan: TrainingPlan, chats: list[Asked], report: Report) -> list[Asked]:
    """Leaves out near-duplicates of the prompts that the plan excludes."""
    if not plan.exclude_near:
        return chats
    judges = _judges_of(plan)
    kept = [chat for chat in chats if not judges.is_near(Chat.of(chat).asked)]
    if chats:
        report(f"{len(chats) - len(kept):,} of {len(chats):,} chats left out: near-duplicates of --exclude-near")
    return kept


@dataclass(frozen=True)
class Answering:
    """Lets the target answer the prompts of a run, and invent them first if the plan says so.

    Rows on disk are not made again.

    Attributes:
        identity: fingerprint of the target.
        features: keeps what the target reads as it answers, for training.
        seconds: returns the time left for answers; `None` for no limit. On a slow machine less is made then.
    """

    target: Any
    tokenizer: Any
    plan: TrainingPlan
    seed: int
    identity: str
    report: Reporter
    features: FeatureCache | None = None
    seconds: Callable[[], float | None] = lambda: None

    @property
    def recipe(self) -> dict[str, Any]:
        """Everything that decides the answers."""
        return {
            "target": self.identity,
            "target_name": self.plan.drafter.get("target_name", ""),
            "target_revision": getattr(self.target.config, "_commit_hash", None),
            "chat_template": hashlib.sha256(str(self.tokenizer.chat_template).encode()).hexdigest()[:16],
            "temperatures": list(self._temperatures),
            "top_k": 0,
            "top_p": 1.0,
            "max_new_tokens": self.plan.max_new_tokens,
            "invented_turns": self.plan.invented_turns,
            "seed": self.seed,
            "made_with": {"hf_hsdraft": __version__, "transformers": transformers_version},
        }

    def all(self, prompts: Sequence[Prompt]) -> list[Conversation]:
        """Returns the answered chats of all prompts."""
        state = PartialState()
        if self.plan.invents:
            prompts = self._invented(self.plan.num_prompts or INVENTED_PROMPTS)
        together = is_sharded(self.target) and self.plan.answers_from is None
        store = self._store(_same_rows(state) if together else RowFolder, state.process_index)
        done = store.keys()
        pending = [prompt for prompt in prompts if prompt.key not in done]
        if not prompts:
            return []
        state.wait_for_everyone()  # until all processes have read the same rows
        share = pending if together else pending[state.process_index :: state.num_processes]
        expected = self._own_answers() if pending else None
        skipped: list[str] = []
        share = prompts_that_fit(self.tokenizer, share, self._longest, lambda prompt, why: skipped.append(why))
        batches = self._batches(share, expected, lambda prompt, why: skipped.append(why))
        with self.report.stage("answering", "prompts", len(share)) as stage:
            told = lambda count, speed: stage.advance(count, f"{speed:,.0f} tokens/s")  # noqa: E731
            store_answers(batches, store, told, self._keep)
        if skipped:
            self.report(f"{len(skipped)} prompts left out; the reason of the first: {skipped[0]}")
        state.wait_for_everyone()
        wanted = {prompt.key for prompt in prompts}
        return [Conversation.of(row["messages"]) for row in store.rows() if row["key"] in wanted]

    def stream(
        self, prompts: Sequence[Prompt], little_time: bool = False, late: Callable[[], bool] = lambda: False
    ) -> Iterator[list[Conversation]]:
        """As `all`, but yields conversations as they come: first all that are on disk, then batch by batch.

        The target invents prompts as they are needed, a full batch of each kind, or with `little_time` a batch of all
        kinds, and fewer while it is `late`. The documents that it writes for them are conversations too, with the
        requests for them. Batches come in random order. If there are not even enough conversations to hold out, a
        ValueError says why no more can be invented.
        """
        store, documents, skipped = self._store(), list[Conversation](), list[str]()
        known = self._made() if self.plan.invents else prompts
        keys, done = {prompt.key for prompt in known}, store.keys()
        rows = (row for row in store.rows() if row["key"] in keys or self._is_document(row))
        group = [Conversation.of(row["messages"]) for row in rows]
        chats, own = len(group), functools.cache(self._own_answers)
        yield group
        for part in self._parts(known, little_time, late, documents):
            if documents:
                group = documents.copy()
                documents.clear()
                chats += len(group)
                yield group
            pending = [prompt for prompt in part if prompt.key not in done]
            pending = prompts_that_fit(self.tokenizer, pending, self._longest, lambda prompt, why: skipped.append(why))
            expected = own() if pending else None
            answers = self._batches(pending, expected, lambda prompt, why: skipped.append(why), shuffled=True)
            for batch in _of_some_size(answers):
                group = self._stored(store, batch)
                batch.clear()  # recorded states would stay in memory while the drafter learns
                chats += len(group)
                yield group
            if skipped:
                self.report(f"{len(skipped)} prompts left out; the reason of the first: {skipped[0]}")
                skipped.clear()
        wanted = self.plan.num_prompts or _ENDLESS
        if self.plan.invents and (why := shortage(len(self._prompts().keys()), wanted)):
            if chats <= self.plan.eval_conversations:
                raise ValueError(why)
            self.report(f"no further prompts: {why}")  # training continues with what is there

    def _parts(
        self, known: Sequence[Prompt], little_time: bool, late: Callable[[], bool], documents: list[Conversation]
    ) -> Iterator[list[Prompt]]:
        """Yields known prompts part by part, then what is invented, see `stream`; adds the documents for that."""
        yield from (list(known[at : at + _PART]) for at in range(0, len(known), _PART))
        if not self.plan.invents:
            return
        kinds, most = len(kinds_to_invent(self.plan, self.tokenizer)), self._inventing_batch
        if little_time and kinds > _FEW_KINDS:
            most = -(-most // kinds)
        wanted, ended = self.plan.num_prompts or _ENDLESS, False
        batches = enumerate(self._inventing(wanted, most, documents), 1)
        while not ended:
            part: list[Prompt] = []
            with self.report.stage("inventing", "prompts", min(kinds * most, wanted)) as stage:
                for number, batch in batches:
                    part += batch
                    stage.advance(len(part))
                    if number % kinds == 0 or late():
                        break
                else:
                    ended = True
            if part:
                self._tell_kinds(part)
            yield part

    @property
    def _inventing_batch(self) -> int:
        """Prompts invented at a time: a server may answer more, but does not invent."""
        own = self.plan.answer_batch_size
        return own if self.plan.answers_from is None else min(own, _LOCAL_BATCH)

    @functools.cached_property
    def _judges(self) -> PromptIndex:
        return _judges_of(self.plan)

    def _is_document(self, row: dict[str, Any]) -> bool:
        return self.plan.invents and row["category"] == _DOCUMENT and not self._near(Conversation.of(row["messages"]))

    def _near(self, chat: Conversation | Prompt) -> bool:
        """Whether a chat is a near-duplicate of a prompt that the plan excludes."""
        return bool(self.plan.exclude_near) and self._judges.is_near(Chat.of(chat).asked)

    def _prompts(self) -> RowFolder:
        """The invented prompts on disk; a ValueError if they were made with other settings."""
        plan, rows = self.plan, _same_rows(PartialState())
        decided: dict[str, Any] = {"openings": list(plan.openings)}
        if not plan.openings:
            shares = {kind.name: kind.share for kind in kinds_to_invent(plan, self.tokenizer)}
            decided = {"kinds": shares, "max_prompt_tokens": self._longest}
        return rows(Path(plan.out) / "prompts", "Prompts a chat model invented.", {**self.recipe, **decided})

    def _made(self) -> list[Prompt]:
        """The invented prompts on disk that the plan does not exclude."""
        made = [prompt_of(row) for row in self._prompts().rows()]
        return [prompt for prompt in made if not self._near(prompt)]

    @property
    def _temperatures(self) -> Sequence[float]:
        return (0.0,) if self.plan.greedy_only else self.plan.temperatures

    @property
    def _longest(self) -> int:
        """Tokens of a first turn at most: it leaves room for an answer within `max_length`, and both fit the window."""
        plan = self.plan
        limit = max(8, plan.max_length - min(plan.max_new_tokens, plan.max_length // 2))
        window = getattr(self.target.config.get_text_config(), "max_position_embeddings", None)
        return limit if window is None else min(limit, window - plan.max_new_tokens)

    def _store(self, rows: type[RowFolder] = RowFolder, writer: int = 0) -> RowFolder:
        return rows(Path(self.plan.out) / "data", "Chats answered by the target.", self.recipe, writer)

    def _invented(self, count: int) -> list[Prompt]:
        """Lets the target invent prompts, until there are `count`."""
        state = PartialState()
        if state.is_main_process or is_sharded(self.target):
            done = len(self._prompts().keys())
            with self.report.stage("inventing", "prompts", count, min(count, done)) as stage:
                for batch in self._inventing(count, self._inventing_batch):
                    done += len(batch)
                    stage.advance(done)
        state.wait_for_everyone()
        rows = list(self._prompts().rows())[:count]
        if why := shortage(len(rows), count):
            raise ValueError(why)
        prompts = leave_near_out(self.plan, [prompt_of(row) for row in rows], self.report)
        self._tell_kinds(prompts)
        return prompts

    def _tell_kinds(self, prompts: Sequence[Prompt]) -> None:
        found = Counter(prompt.category for prompt in prompts)
        self.report(f"invented: {', '.join(f'{count:,} {kind}' for kind, count in found.most_common())}")

    def _inventing(self, count: int, most: int, documents: list[Conversation] | None = None) -> Iterator[list[Prompt]]:
        """Yields what the target invents, until there are `count` prompts, `most` of a batch, without excluded ones.

        New documents are stored, and added to `documents` as answered chats. They are sampled, so a plan that learns
        from greedy answers alone leaves them out.
        """
        plan, written, made, store = self.plan, list[Answered](), self._prompts(), self._store()
        kinds, seconds = kinds_to_invent(plan, self.tokenizer), self.seconds()
        if plan.answers_from is not None and len(made.keys()) < count:  # before the work of inventing
            own = self._own_answers() or ()
            check_server(plan.answers_from, plan.server_model, self._temperatures, own)
        learns = documents is not None and not plan.greedy_only
        known = store.keys() if learns else set()
        recorder = self._recorder() if learns else None
        for batch in invent_prompts(
            self.target,
            self.tokenizer,
            count,
            made,
            kinds,
            seconds=None if seconds is None else seconds / 2 / len(kinds),
            max_prompt_tokens=self._longest,
            batch_size=self._inventing_batch,
            most=most,
            seed=self.seed,
            recorder=recorder or (TapRecorder(()) if can_record(self.target) else None),
            on_document=lambda kind, ask, reply: written.append(_document(kind, ask, reply)),
            on_given_up=lambda name: self.report(
                f"the target invents too few prompts of kind {name}: other kinds take its share"
            ),
        ):
            if documents is not None and learns:
                fresh = {each.prompt.key: each for each in written if each.prompt.key not in known}
                known.update(fresh)
                documents += self._stored(store, [each for each in fresh.values() if not self._near(each.prompt)])
            written.clear()
            yield [prompt for prompt in batch if not self._near(prompt)]

    def _batches(
        self, prompts: Sequence[Prompt], expected: list[str] | None, skip: OnSkip, shuffled: bool = False
    ) -> Iterable[Sequence[Answered]]:
        """Returns the answers in batches, from the plan's server or else from the target.

        `expected` are the target's answers to `PROBES`; `skip` gets each prompt that the server does not answer, and
        why.
        """
        plan, temperatures = self.plan, self._temperatures
        common: dict[str, Any] = {"temperatures": temperatures, "max_new_tokens": plan.max_new_tokens}
        common["seed"] = self.seed
        if plan.answers_from is None or not prompts:
            turns: dict[str, Any] = {"batch_size": plan.answer_batch_size, "invented_turns": plan.invented_turns}
            turns |= {"recorder": self._recorder(), "shuffled": shuffled, "seconds": self.seconds}
            return answer_prompts(self.target, self.tokenizer, prompts, **common, **turns)
        served: dict[str, Any] = {"model": plan.server_model, "concurrency": plan.answer_batch_size}
        answers = answer_by_server(plan.answers_from, prompts, **common, **served, expected=expected, on_skip=skip)
        return ([answered] for answered in answers)

    def _recorder(self) -> TapRecorder | None:
        return TapRecorder(self.features.layers) if self.features is not None and can_record(self.target) else None

    def _stored(self, store: RowFolder, batch: Sequence[Answered]) -> list[Conversation]:
        """Writes answers and what was recorded with them."""
        store.append([row_of(answered) for answered in batch])
        self._keep(batch)
        return [Conversation.of(answered.messages) for answered in batch]

    def _keep(self, batch: Sequence[Answered]) -> None:
        """Keeps what was recorded with answers that are stored."""
        if self.features is not None:
            chats = [(Conversation.of(each.messages), each.read) for each in batch if each.read is not None]
            tokenized = [tokenize_conversation(self.tokenizer, chat, self.plan.max_length) for chat, _ in chats]
            self.features.keep((each, *read) for each, (_, read) in zip(tokenized, chats, strict=True))

    def _own_answers(self) -> list[str] | None:
        """The target's greedy answers to `PROBES`; `None` without a server.

        All processes of a sharded target have to take part.
        """
        if self.plan.answers_from is None:
            return None
        histories: list[list[Message]] = [[{"role": "user", "content": prompt}] for prompt in PROBES]
        return [each.text for each in reply(self.target, self.tokenizer, histories, 0.0, PROBE_TOKENS)]


def _document(kind: Kind, ask: str, reply: Reply) -> Answered:
    messages = [{"role": "user", "content": ask}, {"role": "assistant", "content": reply.text}]
    prompt = Prompt.of([ask], _DOCUMENT)
    return Answered(prompt, kind.document_temperature, messages, reply.new_tokens, reply.read)


def _of_some_size(batches: Iterable[Sequence[Answered]]) -> Iterator[list[Answered]]:
    """Joins batches until each has `_LEAST_BATCH` answers or more, the last one excepted."""
    waiting: list[Answered] = []
    for batch in batches:
        waiting += batch
        del batch  # and what was recorded with it
        if len(waiting) >= _LEAST_BATCH:
            yield waiting
            waiting = []
    if waiting:
        yield waiting


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


class _UnwrittenRows(RowFolder):
    """Rows that another process makes too, and writes."""

    def append(self, rows: Sequence[dict[str, Any]]) -> None: ...


def _same_rows(state: PartialState) -> type[RowFolder]:
    """The class for rows that all processes make alike: only the main process writes."""
    return RowFolder if state.is_main_process else _UnwrittenRows


def in_order(conversations: Sequence[Conversation], seed: int) -> list[Conversation]:
    """Shuffles conversations by digest, so that further conversations do not change the order of the others.

    The first conversations are held out. So a run that starts from the drafter of a run on part of the same data holds
    out no conversation that the earlier run learned from, if that run held out as many.
    """
    return sorted(conversations, key=lambda chat: hashlib.sha256(repr((seed, chat.key)).encode()).hexdigest())
