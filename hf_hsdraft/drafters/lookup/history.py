"""Histories: the past texts of a target that all calls of a drafter draft from, in memory or in a folder.

On disk there is one append-only file for each target, which several processes share. It begins with a header: `MAGIC`,
a random number of this generation of the file, and the digest of target and tokenizer. Records follow, each with its
length, its CRC-32, and its tokens. Writers hold a lock; readers need none: they read complete records from where they
stopped, and ignore a torn one at the end, which the next writer cuts off. A file that is rewritten or erased gets
another number, so that every process drops what it knew of the old one.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import struct
import tempfile
import weakref
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock
from transformers.utils import cached_file, logging

from ...core.checks import public_name
from ...core.forks import new_lock, new_rlock
from ...core.tensors import embedded_tokens
from ...core.tuning import TUNING
from ...runtime.target_limits import text_config
from ...verify.registry import IN_MEMORY, NO_HISTORY
from ..base.protocol import Drafter
from .past_texts import START, Continuation, PastTexts, Record, Trust

MAGIC = b"hsdraft-history1"
SUFFIX = ".history"
_LOCK, _PATIENCE = ".history.lock", 20.0  # seconds that a writer waits for others
_NUMBER, _KEY = 16, 32  # bytes
_HEADER = len(MAGIC) + _NUMBER + _KEY
_RECORD = struct.Struct(f"<II{len(START)}s")  # number of tokens; CRC-32 of number, `Record.start` and tokens; `start`


@dataclass(frozen=True)
class News:
    """What a reader finds."""

    fresh: bool  # whether the file is another one than before, so that earlier records no longer hold
    records: list[Record]


class HistoryFile:
    """The file of one target in a folder, as one reader or writer sees it. Not for several threads at once.

    Args:
        key: digest of target and tokenizer, 32 bytes. A file with another key is no history of this target: it is not
            read, and the next writer replaces it.
    """

    def __init__(self, path: Path, key: bytes) -> None:
        self.path, self._key = path, key
        self._number = b""  # of the generation that was read
        self._end = 0  # of the complete records that were read

    def check_place(self) -> None:
        """Creates the folder, which only its owner can read; raises an OSError where nothing can be written."""
        folder = self.path.parent
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            raise OSError(f'history="{folder}" cannot be used ({error}): name a folder that can be written') from error

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the lock of the folder; raises an OSError if another process holds it for too long."""
        with FileLock(self.path.parent / _LOCK, timeout=_PATIENCE, mode=0o600):
            yield

    def read(self) -> News:
        """Returns the complete records that were added since the last call, or all of them if the file is another."""
        try:
            with self.path.open("rb") as file:
                header = file.read(_HEADER)
                number = header[len(MAGIC) : len(MAGIC) + _NUMBER]
                if len(header) < _HEADER or header != MAGIC + number + self._key:
                    return self._none()
                size = os.fstat(file.fileno()).st_size
                fresh = number != self._number or size < self._end
                self._number, self._end = number, _HEADER if fresh else self._end
                file.seek(self._end)
                records, read = _parsed(file.read() if size > self._end else b"")
        except FileNotFoundError:
            return self._none()
        self._end += read
        return News(fresh, records)

    def _none(self) -> News:
        fresh, self._number, self._end = bool(self._number), b"", 0
        return News(fresh, [])

    def append(self, record: Record) -> None:
        """Appends a record. The caller holds the lock, and has read all that there is."""
        if not self._number:
            self.rewrite([record])
            return
        packed = _packed(record)
        with self.path.open("r+b") as file:
            file.truncate(self._end)  # without what a killed process has left
            file.seek(self._end)
            file.write(packed)
        self._end += len(packed)

    def rewrite(self, records: Sequence[Record]) -> None:
        """Replaces all records. The caller holds the lock. Readers that have the old file open may read on."""
        number = os.urandom(_NUMBER)
        descriptor, partial = tempfile.mkstemp(prefix=".history-", dir=self.path.parent)  # readable by the owner only
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(MAGIC + number + self._key)
                for record in records:
                    file.write(_packed(record))
                self._end = file.tell()
            os.replace(partial, self.path)
        except BaseException:
            Path(partial).unlink(missing_ok=True)
            raise
        self._number = number

    def erase(self) -> None:
        with self.locked():
            self.path.unlink(missing_ok=True)
            for left in self.path.parent.glob(".history-*"):  # of processes that were killed
                left.unlink(missing_ok=True)


def read_all(path: Path) -> list[Record]:
    """Returns the records of any history file; raises a ValueError if it is none."""
    content = path.read_bytes()
    if len(content) < _HEADER or not content.startswith(MAGIC):
        raise ValueError(f"{path} is no history: expected a file that drafting with the option `history` has written")
    return _parsed(content[_HEADER:])[0]


def _packed(record: Record) -> bytes:
    tokens = np.ascontiguousarray(record.tokens, dtype="<i4").tobytes()
    count = len(record.tokens)
    return _RECORD.pack(count, _checksum(count, record.start, tokens), record.start) + tokens


def _checksum(count: int, start: bytes, tokens: bytes) -> int:
    return zlib.crc32(tokens, zlib.crc32(count.to_bytes(4, "little") + start))


def _parsed(content: bytes) -> tuple[list[Record], int]:
    """Returns the complete records at the beginning of `content`, and how many bytes they take."""
    records, begin = list[Record](), 0
    while begin + _RECORD.size <= len(content):
        count, checksum, start = _RECORD.unpack_from(content, begin)
        end = begin + _RECORD.size + 4 * count
        tokens = content[begin + _RECORD.size : end]
        if end > len(content) or _checksum(count, start, tokens) != checksum:
            break
        records.append(Record(np.frombuffer(tokens, dtype="<i4").astype(np.int32), start))
        begin = end
    return records, begin


logger = logging.get_logger(__name__)


class History:
    """Past texts of one target. Threads may share it; processes share its `file`, if it has one.

    Attributes:
        trust: how often drafts from it were right.
    """

    def __init__(self, vocab_size: int, file: HistoryFile | None = None, most_tokens: int = 0) -> None:
        self.vocab_size, self.trust = vocab_size, Trust()
        self._file, self._most = file, most_tokens or TUNING.history_tokens
        self._texts = PastTexts([], vocab_size, self._most)
        self._reading = new_lock()  # of the texts, for microseconds
        self._changing = new_rlock()  # of texts and file, taken before the other one

    @property
    def held(self) -> tuple[int, int, int]:
        """Number of texts, their tokens, and the bytes of memory that they take."""
        return len(self._texts), self._texts.tokens, self._texts.bytes

    def find(self, tail: Sequence[int], depth: int) -> list[Continuation]:
        """Returns what followed the last tokens of `tail` in past texts, up to `depth` tokens."""
        with self._reading:
            return self._texts.find(tail, depth)

    def refresh(self) -> None:
        """Takes what other processes have written; raises an OSError if the file cannot be read."""
        if self._file is not None:
            with self._changing:
                self._take(self._file.read())

    def remember(self, texts: Sequence[tuple[Sequence[int], Sequence[int]]]) -> None:
        """Adds the prompts and answers of a call that has ended. What cannot be written is a warning."""
        try:
            self.enter(texts)
        except OSError as error:
            logger.warning_once(f"a text is missing in the history, as it could not be written: {error}")

    def enter(self, texts: Sequence[tuple[Sequence[int], Sequence[int]]]) -> None:
        """Adds prompts and answers; raises an OSError if they cannot be written."""
        arrays = [(np.array(prompt, dtype=np.int32), np.array(answer, dtype=np.int32)) for prompt, answer in texts]
        with self._changing, self._locked_file() as file:
            if file is not None:
                self._take(file.read())
            for prompt, answer in arrays:
                prompt = prompt[max(len(prompt) + len(answer) - self._most // 2, 0) :]
                with self._reading:
                    record = self._texts.unknown_part(prompt, answer[-(self._most // 2) :])
                if record is not None:
                    self._add(record, file)

    @contextlib.contextmanager
    def _locked_file(self) -> Iterator[HistoryFile | None]:
        if self._file is None:
            yield None
            return
        with self._file.locked():
            yield self._file

    def _take(self, news: News) -> None:
        if news.fresh:
            self._replace(PastTexts(news.records, self.vocab_size, self._most))
            return
        for record in news.records:
            self._add(record)

    def _add(self, record: Record, file: HistoryFile | None = None) -> None:
        """Adds a record, to the file too if it is given. If older texts have to leave, the file is written again."""
        before, texts = len(self._texts), self._texts.with_room(len(record.tokens))
        if file is not None and len(texts) < before:
            file.rewrite([*texts.records(), record])
        elif file is not None:
            file.append(record)
        with self._reading:
            self._texts = texts
            texts.add(record)

    def _replace(self, texts: PastTexts) -> None:
        with self._reading:
            self._texts = texts

    def erase(self) -> None:
        """Forgets all texts, in the file too."""
        with self._changing:
            if self._file is not None:
                self._file.erase()
            self._replace(PastTexts([], self.vocab_size, self._most))
            self.trust = Trust()


_of_drafters: weakref.WeakKeyDictionary[Any, weakref.WeakKeyDictionary[Any, dict[str, History]]] = (
    weakref.WeakKeyDictionary()
)
_MOST_FOLDERS = 4  # whose texts a drafter keeps in memory
_of_files: weakref.WeakValueDictionary[str, History] = weakref.WeakValueDictionary()
_lock = new_lock()


def history_of(drafter: Drafter, target: Any, option: str) -> History | None:
    """Returns the history that the option `history` asks for, up to date; None for none.

    In memory it is that of the drafter and the target. In a folder it is that of the target, whatever drafts.

    Raises:
        OSError: the folder cannot be used.
    """
    if option == NO_HISTORY:
        return None
    with _lock:
        known = _of_drafters.setdefault(drafter, weakref.WeakKeyDictionary()).setdefault(target, {})
        history = known.pop(option, None) or _made(target, option)
        known[option] = history  # the last one
        for unused in [name for name in known if name != IN_MEMORY][:-_MOST_FOLDERS]:
            del known[unused]
    history.refresh()
    return history


def _made(target: Any, option: str) -> History:
    vocab_size = embedded_tokens(target)
    if option == IN_MEMORY:
        return History(vocab_size)
    name, key = identity_of(target)
    path = Path(option).expanduser().absolute() / f"{name}-{key.hex()[:16]}{SUFFIX}"
    history = _of_files.get(str(path))
    if history is None:
        file = HistoryFile(path, key)
        file.check_place()
        history = _of_files[str(path)] = History(vocab_size, file)
    return history


def identity_of(target: Any) -> tuple[str, bytes]:
    """Returns a target's name, fit for a file, and a digest of name, sizes and tokenizer, but not of its weights."""
    config, place = text_config(target), str(getattr(target, "name_or_path", "") or "")
    name = public_name(place)
    sizes = [getattr(config, field, None) for field in ("model_type", "vocab_size", "hidden_size", "num_hidden_layers")]
    digest = hashlib.sha256(repr((name, sizes, _tokenizer_digest(place))).encode()).digest()
    return re.sub(r"[^\w.-]+", "-", name)[:64].strip("-.") or str(sizes[0]), digest


def _tokenizer_digest(place: str) -> str:
    """The digest of the tokenizer's file beside the weights; "" where there is none on this machine."""
    try:
        found = cached_file(
            place, "tokenizer.json", local_files_only=True, _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False, _raise_exceptions_for_gated_repo=False,
        ) if place else None  # fmt: skip
    except (OSError, ValueError):
        return ""
    return "" if found is None else hashlib.sha256(Path(found).read_bytes()).hexdigest()


@dataclass(frozen=True)
class HistoryContents:
    """What a history holds of one target.

    Attributes:
        target: name of the target.
        texts: number of texts, or of parts whose beginnings are in earlier ones.
        tokens: number of their tokens.
        bytes: size of the file, or of what they take in memory.
        path: the file; None in memory.
    """

    target: str
    texts: int
    tokens: int
    bytes: int
    path: Path | None = None


def list_history(where: Drafter | str | os.PathLike[str]) -> list[HistoryContents]:
    """Lists what a folder or a drafter's memory holds for each target; an error if there is none, or a damaged file."""
    if isinstance(where, Drafter):
        kept = [(identity_of(target)[0], history) for target, history in _in_memory(where)]
        return [HistoryContents(name, *history.held) for name, history in kept]
    found = []
    for path in _files(where):
        records = read_all(path)
        tokens = sum(len(record.tokens) for record in records)
        found.append(HistoryContents(_target_in(path), len(records), tokens, path.stat().st_size, path))
    return found


def erase_history(where: Drafter | str | os.PathLike[str], target: str = "") -> int:
    """Erases what a folder holds, or what the calls of a drafter have kept in memory; returns how many texts.

    Processes that draft from a file drop its texts with their next call. Damaged files are erased too, and what killed
    processes have left; their texts are not counted.

    Args:
        target: name of a target, as `list_history` gives it; default: all.

    Raises:
        NotADirectoryError: there is no such folder.
        ValueError: there is no history of this target.
    """
    if isinstance(where, Drafter):
        kept = [(identity_of(model)[0], history) for model, history in _in_memory(where)]
        _check_known(target, [name for name, _ in kept])
        chosen = [history for name, history in kept if target in ("", name)]
        texts = sum(history.held[0] for history in chosen)
        for history in chosen:
            history.erase()
        return texts
    paths = _files(where)
    _check_known(target, [_target_in(path) for path in paths])
    texts = 0
    for path in paths or [Path(where).expanduser().absolute() / SUFFIX]:
        if target in ("", _target_in(path)):
            if path.exists():
                with contextlib.suppress(ValueError):
                    texts += len(read_all(path))
            used_here = _of_files.get(str(path))
            used_here.erase() if used_here is not None else HistoryFile(path, b"").erase()
    return texts


def _check_known(target: str, names: Sequence[str]) -> None:
    if target and target not in names:
        raise ValueError(
            f"there is no history of {target!r}: expected one of {', '.join(names) or 'none, it is empty'}"
        )


def _in_memory(drafter: Drafter) -> list[tuple[Any, History]]:
    with _lock:
        kept = list(_of_drafters.get(drafter, {}).items())
    return [(target, histories[IN_MEMORY]) for target, histories in kept if IN_MEMORY in histories]


def _files(folder: str | os.PathLike[str]) -> list[Path]:
    path = Path(folder).expanduser().absolute()
    if not path.is_dir():
        raise NotADirectoryError(f"{path} is no folder: expected one that the option `history` names, or a drafter")
    return sorted(path.glob(f"*{SUFFIX}"))


def _target_in(path: Path) -> str:
    return path.name.removesuffix(SUFFIX).rpartition("-")[0]
