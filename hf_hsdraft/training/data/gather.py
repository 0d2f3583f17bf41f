"""Gathers the conversations of a plan, lets the target make them, and orders those that are learned meanwhile."""

from __future__ import annotations

import functools
import hashlib
import itertools
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from accelerate import PartialState
from torch.utils.data import IterableDataset
from transformers import TrainerCallback
from transformers import __version__ as transformers_version
from transformers.trainer_callback import ExportableState

from ..._version import __version__
from ...core.methods import load
from ...core.progress import Reporter
from ...runtime.target_loading import is_sharded
from ..files import RowFolder
from .conversations import (
    Conversation,
    Message,
    Prompt,
    keeps_turns,
    prompts_from_dataset,
    read_chats,
    read_jsonl,
    render,
    tokenize_conversation,
)
from .features import FeatureCache
from .generating import (
    Answered,
    OnSkip,
    Reply,
    TapRecorder,
    TargetWriter,
    answer_prompts,
    can_record,
    prompts_that_fit,
    row_of,
)
from .inventing import Kind, chosen_kinds, invent_prompts, kind_of_openings, prompt_of, shortage
from .plan import INVENTED_PROMPTS, Report, TrainingPlan

Asked = TypeVar("Asked", Conversation, Prompt)

_LEAST_SECONDS = 2.0  # for a batch of answers
_LOCAL_BATCH = 64  # most prompts invented at a time where a server answers
_DOCUMENT = "document"  # category of chats in which the target wrote a document for a prompt
_ENDLESS = 10**6  # prompts of a stream, unless the plan says how many
_TOGETHER, _TOGETHER_SECONDS = 16, 60.0  # answers of a server that are written together; a killed run loses them
_PART = 1024  # prompts given to a stream that it looks at together, before it answers the first


def read_files(
    plan: TrainingPlan,
    on_bad_line: Callable[[str], None] | None = None,
    check: Callable[[Conversation], object] | None = None,
) -> tuple[list[Conversation], list[Prompt]]:
    """Reads finished conversations and prompts from the files of a plan; see `read_jsonl` for arguments and errors.

    A file that holds neither is a ValueError.
    """
    finished, prompts = list[Conversation](), list[Prompt]()
    for path in plan.prompts:
        chats, asked = read_jsonl(path, plan.greedy_only, on_bad_line, check)
        if not chats and not asked:
            raise ValueError(f"{path} holds no prompts: expected lines with `turns` or `messages`")
        finished += chats
        prompts += asked
    return finished, prompts


def read_sources(
    plan: TrainingPlan, tokenizer: Any, seed: int, on_bad_line: Callable[[str], None] | None, report: Report
) -> tuple[list[Conversation], list[Prompt]]:
    """Reads finished conversations and prompts from the files and the data set of a plan. `seed` orders the prompts.

    Raises a ValueError: a file, or one that the plan excludes, holds neither; the tokenizer's template cannot render a
    conversation; or see `read_jsonl` and `prompts_from_dataset`.
    """
    finished, prompts = read_files(plan, on_bad_line, functools.partial(render, tokenizer))
    if plan.dataset is not None:
        prompts += prompts_from_dataset(plan.dataset, plan.dataset_config, plan.dataset_split, plan.dataset_column)
    judges = judges_of(plan)
    finished, prompts = leave_near_out(judges, finished, report), leave_near_out(judges, prompts, report)
    unique = {prompt.key: prompt for prompt in prompts}
    order = sorted(unique, key=lambda key: hashlib.sha256(f"{seed} {key}".encode()).hexdigest())
    return finished, [unique[key] for key in order][: plan.num_prompts]


def judges_of(plan: TrainingPlan) -> Any:
    """Returns the index of the prompts that a plan excludes; `None` if there are none."""
    if not plan.exclude_near:
        return None
    return load("excluding", "near").PromptIndex(
        [chat.turns for path in plan.exclude_near for chat in read_chats(path)]
    )


def leave_near_out(judges: Any, chats: list[Asked], report: Report) -> list[Asked]:
    """Leaves out near-duplicates of the prompts that a plan excludes, and reports how many."""
    if judges is None or not chats:
        return chats
    kept = [chat for chat in chats if not judges.is_near(chat.turns)]
    report(f"{len(chats) - len(kept):,} of {len(chats):,} chats left out: near-duplicates of --exclude-near")
    return kept


def recipe_of(target: Any, tokenizer: Any, plan: TrainingPlan, seed: int, identity: str) -> dict[str, Any]:
    """Everything that decides the answers; `identity` is the target's fingerprint."""
    return {
        "target": identity,
        "target_name": plan.drafter.get("target_name", ""),
        "target_revision": getattr(target.config, "_commit_hash", None),
        "chat_template": hashlib.sha256(str(tokenizer.chat_template).encode()).hexdigest()[:16],
        "temperatures": [0.0] if plan.greedy_only else list(plan.temperatures),
        "top_k": 0,
        "top_p": 1.0,
        "max_new_tokens": plan.max_new_tokens,
        "invented_turns": plan.invented_turns,
        "seed": seed,
        "made_with": {"hf_hsdraft": __version__, "transformers": transformers_version},
    }


class Answering:
    """Lets the target answer the prompts of a run, and invent them first if the plan says so. Rows on disk are kept.

    Args:
        features: keeps what the target reads as it answers, for training.
        grows: whether training may begin before all is answered. Prompts are then invented and answered part by part,
            in random order, and the documents that the target writes for prompts are conversations too.
        seconds: returns the time left for answers; `None` for no limit.
    """

    def __init__(
        self,
        target: Any,
        tokenizer: Any,
        plan: TrainingPlan,
        seed: int,
        identity: str,
        report: Reporter,
        features: FeatureCache | None = None,
        grows: bool = True,
        seconds: Callable[[], float | None] = lambda: None,
    ) -> None:
        self._target, self._tokenizer, self._plan, self._seed, self._report = target, tokenizer, plan, seed, report
        self._features, self._grows, self._seconds = features, grows, seconds
        self._state, self._judges, records = PartialState(), judges_of(plan), can_record(target)
        self._recorder = TapRecorder(features.layers) if features is not None and records else None
        self._served: Any = load("answering", "server") if plan.answers_from is not None else None
        recipe = recipe_of(target, tokenizer, plan, seed, identity)
        self._temperatures: Sequence[float] = recipe["temperatures"]
        self._together = is_sharded(target) and plan.answers_from is None  # all processes make the same answers
        self._wanted = plan.num_prompts or (_ENDLESS if grows else INVENTED_PROMPTS)  # prompts to invent
        # A first turn leaves room for an answer within `max_length`, and both fit the window.
        window = getattr(target.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize
        room = max(8, plan.max_length - min(plan.max_new_tokens, plan.max_length // 2))
        self._longest = min(room, window - plan.max_new_tokens)
        one = 0 if self._state.is_main_process else None  # where all processes make the same rows, one writes them
        writer, out = one if self._together else self._state.process_index, Path(plan.out)
        self._chats = RowFolder(out / "data", "Chats answered by the target.", recipe, writer)
        self._kinds = kinds_to_invent(plan, tokenizer) if plan.invents else []
        decided: dict[str, Any] = {"openings": list(plan.openings)}
        if not plan.openings:
            shares = {kind.name: kind.share for kind in self._kinds}
            decided = {"kinds": shares, "max_prompt_tokens": self._longest}
        checked = {**recipe, **decided} if plan.invents else None
        self._prompts = RowFolder(out / "prompts", "Prompts a chat model invented.", checked, one)

    def groups(self, prompts: Sequence[Prompt]) -> Iterator[list[Conversation]]:
        """Yields conversations: first all that are on disk, then batch by batch as the target answers.

        Each of several processes answers its share, and yields in the end what the others have answered. If there are
        not even enough conversations to hold out, a ValueError says why no more can be invented.
        """
        state, plan, skipped = self._state, self._plan, list[str]()
        known = leave_near_out(self._judges, self._made(), self._report) if plan.invents else list(prompts)
        keys, done = {prompt.key for prompt in known}, self._chats.keys()
        if plan.answers_from is not None and (keys - done or (plan.invents and len(keys) < self._wanted)):
            asked: list[list[Message]] = [[{"role": "user", "content": prompt}] for prompt in self._served.PROBES]
            target, tokenizer = self._target, self._tokenizer
            own = [each.text for each in TargetWriter(target, tokenizer).reply(asked, 0.0, self._served.PROBE_TOKENS)]
            self._served.check_server(plan.answers_from, plan.server_model, self._temperatures, own)
        rows = [row for row in self._chats.rows() if row["key"] in keys or self._is_document(row)]
        seen, chats = {row["key"] for row in rows}, len(rows)
        yield [Conversation.of(row["messages"]) for row in rows]
        state.wait_for_everyone()  # until all processes have read the same rows
        for part, documents in self._parts(known):
            keys |= {prompt.key for prompt in part}
            pending = [prompt for prompt in part if prompt.key not in done]
            share = pending if self._together else pending[state.process_index :: state.num_processes]
            share = prompts_that_fit(self._tokenizer, share, self._longest, lambda prompt, why: skipped.append(why))
            answers = self._stored_groups(self._batches(share, lambda prompt, why: skipped.append(why)))
            for group in itertools.chain([documents] if documents else [], answers):
                chats += len(group)
                yield group
            seen |= {prompt.key for prompt in share}
            if skipped:
                self._report(f"{len(skipped)} prompts left out; the reason of the first: {skipped[0]}")
                skipped.clear()
        state.wait_for_everyone()
        if state.num_processes > 1:
            others = [row for row in self._chats.rows() if row["key"] in keys - seen]
            chats += len(others)
            yield [Conversation.of(row["messages"]) for row in others]
        if self._grows and plan.invents and (why := self._shortage()):
            if chats <= plan.eval_conversations:
                raise ValueError(why)
            self._report(f"no further prompts: {why}")  # training continues with what is there

    def _parts(self, known: Sequence[Prompt]) -> Iterator[tuple[list[Prompt], list[Conversation]]]:
        """Yields known prompts part by part, then what is invented, with the documents written for that.

        The target invents a full batch of each kind at a time, while half of the time for answers is left, or all at
        once unless conversations may grow.
        """
        size = _PART if self._grows else max(len(known), 1)
        yield from ((list(known[at : at + size]), []) for at in range(0, len(known), size))
        if not self._plan.invents:
            return
        state, kinds = self._state, len(self._kinds)
        at_once = kinds * self._inventing_batch if self._grows else self._wanted
        batches = self._inventing() if state.is_main_process or is_sharded(self._target) else iter(())
        before, ended, half = {prompt.key for prompt in known}, False, (self._left() or 0.0) / 2
        while not ended:
            part, documents = list[Prompt](), list[Conversation]()
            with self._report.stage("inventing", "prompts", min(at_once, self._wanted - len(before))) as stage:
                ended = True
                for number, (batch, written) in enumerate(batches, 1):
                    part += batch
                    documents += written
                    stage.advance(len(part))
                    if self._grows and (number == kinds or (self._left() or half) < half):
                        ended = False
                        break
            state.wait_for_everyone()
            if state.num_processes > 1:  # the main process has invented for all
                part = [prompt for prompt in self._made() if prompt.key not in before]
            if not self._grows and (why := self._shortage()):
                raise ValueError(why)
            before |= {prompt.key for prompt in part}
            part = leave_near_out(self._judges, part, self._report)
            if part:
                found = Counter(prompt.category for prompt in part)
                self._report(f"invented: {', '.join(f'{count:,} {kind}' for kind, count in found.most_common())}")
            yield part, documents

    def expected(self, prompts: Sequence[Prompt]) -> int:
        """Number of prompts that this process answers at most."""
        count = self._wanted if self._plan.invents else len(prompts)
        return count if self._together else -(-count // self._state.num_processes)

    @property
    def _inventing_batch(self) -> int:
        """Prompts invented at a time: a server may answer more, but does not invent."""
        own = self._plan.answer_batch_size
        return own if self._plan.answers_from is None else min(own, _LOCAL_BATCH)

    def _is_document(self, row: dict[str, Any]) -> bool:
        wanted = self._grows and self._plan.invents and row["category"] == _DOCUMENT
        return wanted and not self._near(Conversation.of(row["messages"]))

    def _near(self, chat: Conversation | Prompt) -> bool:
        """Whether a chat is a near-duplicate of a prompt that the plan excludes."""
        return self._judges is not None and self._judges.is_near(chat.turns)

    def _made(self) -> list[Prompt]:
        """The invented prompts on disk, as many as the plan wants."""
        return [prompt_of(row) for row in itertools.islice(self._prompts.rows(), self._wanted)]

    def _shortage(self) -> str:
        return shortage(len(self._prompts.keys()), self._wanted)

    def _inventing(self) -> Iterator[tuple[list[Prompt], list[Conversation]]]:
        """Yields what the target invents, until there are as many prompts as are wanted.

        New documents are stored, and yielded as answered chats. They are sampled, so a plan that learns from greedy
        answers alone leaves them out.
        """
        plan, written, whole = self._plan, list[Answered](), self._left()
        learns = self._grows and not plan.greedy_only
        known, recorder = self._chats.keys() if learns else set(), self._recorder if learns else None
        for batch in invent_prompts(
            self._target,
            self._tokenizer,
            self._wanted,
            self._prompts,
            self._kinds,
            seconds=lambda: None if whole is None or self._left() is None else whole / 2 / len(self._kinds),
            max_prompt_tokens=self._longest,
            batch_size=self._inventing_batch,
            seed=self._seed,
            recorder=recorder or (TapRecorder(()) if can_record(self._target) else None),
            on_document=lambda kind, ask, reply: written.append(_document(kind, ask, reply)),
            on_given_up=lambda name: self._report(
                f"the target invents too few prompts of kind {name}: other kinds take its share"
            ),
        ):
            fresh = {each.prompt.key: each for each in written if learns and each.prompt.key not in known}
            known.update(fresh)
            written.clear()
            yield batch, self._stored([each for each in fresh.values() if not self._near(each.prompt)])

    def _batches(self, prompts: Sequence[Prompt], skip: OnSkip) -> Iterable[Sequence[Answered]]:
        """Returns the answers in batches, from the plan's server or else from the target.

        `skip` gets each prompt that the server does not answer, and why.
        """
        plan = self._plan
        common: dict[str, Any] = {"temperatures": self._temperatures, "max_new_tokens": plan.max_new_tokens}
        common["seed"] = self._seed
        if plan.answers_from is None or not prompts:
            turns: dict[str, Any] = {"batch_size": plan.answer_batch_size, "invented_turns": plan.invented_turns}
            turns |= {"recorder": self._recorder, "shuffled": self._grows, "seconds": self._left}
            return answer_prompts(self._target, self._tokenizer, prompts, **common, **turns)
        served: dict[str, Any] = {"model": plan.server_model, "concurrency": plan.answer_batch_size}
        answers = self._served.answer_by_server(plan.answers_from, prompts, **common, **served, on_skip=skip)
        return ([answered] for answered in answers)

    def _left(self) -> float | None:
        """Seconds that a batch of answers may take."""
        left = self._seconds()
        return None if left is None else max(left, _LEAST_SECONDS)

    def _stored_groups(self, batches: Iterable[Sequence[Answered]]) -> Iterator[list[Conversation]]:
        """Writes answers as they come, and yields their conversations. Single ones are collected."""
        waiting, last = list[Answered](), time.monotonic()
        try:
            for batch in batches:
                waiting += batch
                together = len(batch) > 1 or len(waiting) >= _TOGETHER or time.monotonic() - last > _TOGETHER_SECONDS
                del batch  # recorded states would stay in memory while the drafter learns
                if together:
                    yield self._stored(waiting)
                    last = time.monotonic()
        finally:
            rest = self._stored(waiting)
        if rest:
            yield rest

    def _stored(self, batch: list[Answered]) -> list[Conversation]:
        """Writes answers and what was recorded with them, and empties the list."""
        chats = [Conversation.of(answered.messages) for answered in batch]
        self._chats.append([row_of(answered) for answered in batch])
        if self._features is not None and batch:
            read = [(chat, each.read) for chat, each in zip(chats, batch, strict=True) if each.read is not None]
            tokenized = [tokenize_conversation(self._tokenizer, chat, self._plan.max_length) for chat, _ in read]
            self._features.keep((each, *states) for each, (_, states) in zip(tokenized, read, strict=True))
        batch.clear()
        return chats


def _document(kind: Kind, ask: str, reply: Reply) -> Answered:
    messages = [{"role": "user", "content": ask}, {"role": "assistant", "content": reply.text}]
    prompt = Prompt.of([ask], _DOCUMENT)
    return Answered(prompt, kind.document_temperature, messages, reply.new_tokens, reply.read)


def kinds_to_invent(plan: TrainingPlan, tokenizer: Any) -> list[Kind]:
    """Returns the kinds of prompts to invent; a ValueError if the plan names one that is unknown or cannot be rendered.

    Kinds with several turns are left out if the template changes earlier turns, unless the plan names kinds.
    """
    if plan.openings:
        return [kind_of_openings(plan.openings)]
    kinds = chosen_kinds(plan.kinds)
    try:
        kept = not any(kind.follow_ups for kind in kinds) or keeps_turns(tokenizer)
    except ValueError:
        if plan.kinds:
            raise
        kept = False
    return [kind for kind in kinds if kept or plan.kinds or not kind.follow_ups]


def in_order(conversations: Sequence[Conversation], seed: int) -> list[Conversation]:
    """Shuffles conversations by digest, so that further conversations do not change the order of the others.

    The first conversations are held out. So a run that starts from the drafter of a run on part of the same data holds
    out no conversation that the earlier run learned from, if that run held out as many.
    """
    return sorted(conversations, key=lambda chat: hashlib.sha256(repr((seed, chat.key)).encode()).hexdigest())


_SHUFFLED = 64  # new conversations that are shuffled together: a resumed run repeats so many at most


class StreamPlace(TrainerCallback, ExportableState):
    """Where a resumed stream continues; checkpoints keep it.

    Args:
        repeated: number of new conversations that earlier resumptions learned as new again.
        begin: number of known conversations that are not new any more.
    """

    def __init__(self, repeated: int = 0, begin: int = 0) -> None:
        self.repeated, self.begin = repeated, begin

    @classmethod
    def after(cls, samples: int, passes: int, stored: Mapping[str, Any]) -> StreamPlace:
        """Returns the place after so many samples; `stored` are the attributes in the checkpoint, empty for none."""
        before = stored.get("repeated", 0)
        learned = max(samples // passes - before, 0)  # at least, except for the slice that was interrupted
        begin = max(learned - _SHUFFLED, 0)
        return cls(before + learned - begin, begin)

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"repeated": self.repeated}}


class ChatStream(IterableDataset[Any]):
    """Conversations in the order of learning, without end: the `known` ones, of which `begin` are not new, and groups.

    With each group as many earlier conversations are drawn as it takes to learn each `passes` times on average. When no
    new ones are left, all are drawn again and again.
    """

    def __init__(
        self, known: Sequence[Any], groups: Iterable[Sequence[Any]], passes: int, seed: int, begin: int = 0
    ) -> None:
        self._known, self._groups, self._passes, self._begin = known, groups, passes, begin
        self._random = random.Random(seed)

    def __iter__(self) -> Iterator[Any]:
        chats = [(self._known, index) for index in range(len(self._known))]
        yield from self._learned(chats[self._begin :], chats)
        for group in self._groups:
            new = [(group, index) for index in range(len(group))]
            chats += new
            yield from self._learned(new, chats)
        while chats:
            yield from self._shuffled(chats, [])

    def _learned(self, new: Sequence[Any], chats: Sequence[Any]) -> Iterator[Any]:
        for at in range(0, len(new), _SHUFFLED):
            yield from self._shuffled(new[at : at + _SHUFFLED], chats)

    def _shuffled(self, new: Sequence[Any], chats: Sequence[Any]) -> Iterator[Any]:
        """Yields new conversations and, `passes` - 1 times as many, draws from all."""
        again = self._random.choices(chats, k=(self._passes - 1) * len(new)) if chats else []
        order = [*new, *again]
        self._random.shuffle(order)
        for chats_of_group, index in order:
            yield chats_of_group[index]
