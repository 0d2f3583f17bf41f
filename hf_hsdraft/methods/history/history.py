"""Histories: the past texts of a target that all calls of a drafter draft from, in memory or in a folder.

On disk each target has an SQLite database, which several processes share. Texts are numbered by time. A process reads
those added since its last call; if the first number has changed, texts were erased or dropped, and it reads all.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import sqlite3
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers.utils import cached_file, logging

from ...core.checks import public_name
from ...core.forks import new_lock, new_rlock
from ...core.kept import kept_with
from ...core.tensors import embedded_tokens
from ...drafters.base.protocol import Call, Drafter
from ...runtime.target_limits import text_config
from ...verify.registry import IN_MEMORY, NO_HISTORY
from .past_texts import Continuation, HistorySession, PastTexts, Record, Trust

HISTORY_TOKENS = 2**22  # number of tokens that a history keeps - by hand: they take 120 MB

logger = logging.get_logger(__name__)

SUFFIX = ".history"
_KIND = 0x68736874  # of an SQLite file that is a history
_PATIENCE = {True: 20.0, False: 1.0}  # seconds that a writer waits for other processes, and a reader
_UNKNOWN = -1
_NEW = (
    f"PRAGMA application_id = {_KIND}",
    "CREATE TABLE texts (number INTEGER PRIMARY KEY, start BLOB, tokens BLOB)",
)


@contextlib.contextmanager
def _opened(path: Path, writes: bool, makes: bool = False) -> Iterator[sqlite3.Connection]:
    """A transaction on a file that only its owner can read, and that it `makes` if it is missing or empty.

    Raises an OSError if it cannot be used now, and a ValueError if it is no history.
    """
    try:
        if makes:
            with contextlib.suppress(FileExistsError):
                os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            makes = not path.stat().st_size
        place, writes = f"{path.absolute().as_uri()}?mode=rw", writes or makes
        connected = sqlite3.connect(place, timeout=_PATIENCE[writes], isolation_level=None, uri=True)
        with contextlib.closing(connected) as base, base:
            base.execute("PRAGMA secure_delete = ON")  # overwrites texts that leave
            base.execute("PRAGMA synchronous = OFF")  # a file that a loss of power has damaged is replaced
            if makes:
                base.execute("PRAGMA auto_vacuum = FULL")  # it shrinks when texts leave
            base.execute("BEGIN IMMEDIATE" if writes else "BEGIN")
            if makes and not base.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                for statement in _NEW:
                    base.execute(statement)
            if base.execute("PRAGMA application_id").fetchone()[0] != _KIND:
                raise sqlite3.DatabaseError("another program's")
            yield base
    except sqlite3.OperationalError as error:
        raise OSError(f"{path}: {error}") from error
    except sqlite3.DatabaseError as error:
        raise ValueError(
            f"{path} is no history ({error}): expected a file that drafting with the option `history` has written"
        ) from error


def _records(base: sqlite3.Connection, after: int = 0) -> tuple[list[Record], int]:
    """Returns the records that were added after one, and the number of the last one."""
    rows = base.execute("SELECT * FROM texts WHERE number > ? ORDER BY number", (after,)).fetchall()
    records = [Record(np.frombuffer(tokens, dtype="<i4").astype(np.int32), start) for _, start, tokens in rows]
    return records, rows[-1][0] if rows else after


def read_all(path: Path) -> list[Record]:
    """Returns the records of any history file; raises a ValueError if it is none, an OSError if it cannot be read."""
    with _opened(path, writes=False) as base:
        return _records(base)[0]


def _erase(path: Path) -> None:
    try:
        with _opened(path, writes=True) as base:
            base.execute("DELETE FROM texts")
    except ValueError:
        with path.open("rb") as file:
            head = file.read(72)
        if not head.startswith(b"SQLite format 3") or head[68:] == _KIND.to_bytes(4, "big"):  # not another program's
            path.unlink()


class History:
    """Past texts of one target. Threads may share it; processes share its file, if it has one.

    Attributes:
        trust: how often drafts from it were right.
    """

    def __init__(self, vocab_size: int, path: Path | None = None, most_tokens: int = 0) -> None:
        self.vocab_size, self.trust = vocab_size, Trust()
        self._path, self._most = path, most_tokens or HISTORY_TOKENS
        self._first = self._last = _UNKNOWN  # numbers of the first and the last text of the file
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

    def session(self, call: Call) -> HistorySession:
        """What drafts from it in a call."""
        return HistorySession(call, self)

    @contextlib.contextmanager
    def _up_to_date(self, writes: bool) -> Iterator[sqlite3.Connection | None]:
        """Takes what other processes have written, and holds texts and file; raises as `_opened`."""
        with self._changing:
            try:
                with _opened(self._path, writes, True) if self._path else contextlib.nullcontext() as base:
                    if base is not None:
                        self._take(base)
                    yield base
            except BaseException:
                self._first = self._last = _UNKNOWN  # what is in memory may not be in the file
                raise

    def _take(self, base: sqlite3.Connection) -> None:
        first = base.execute("SELECT min(number) FROM texts").fetchone()[0] or 0
        fresh = first != self._first
        records, last = _records(base, 0 if fresh else self._last)
        if fresh:
            self._replace(PastTexts(records, self.vocab_size, self._most))
        for record in () if fresh else records:
            self._add(record)
        self._first, self._last = first, last

    def refresh(self) -> None:
        """Takes what other processes have written, if the file can be read now; a damaged one is replaced."""
        if self._path is None:
            return
        try:
            try:
                with self._up_to_date(writes=False):
                    pass
            except ValueError as error:
                logger.warning(f"{error}; it is replaced by an empty one")
                self._path.unlink(missing_ok=True)
                with self._up_to_date(writes=True):
                    pass
        except OSError as error:
            logger.warning_once(f"what other processes have added to the history cannot be read now: {error}")

    def remember(self, texts: Sequence[tuple[Sequence[int], Sequence[int]]]) -> None:
        """Adds the prompts and answers of a call that has ended. What cannot be written is a warning."""
        try:
            self.enter(texts)
        except (OSError, ValueError) as error:
            logger.warning_once(f"a text is missing in the history, as it could not be written: {error}")

    def enter(self, texts: Sequence[tuple[Sequence[int], Sequence[int]]]) -> None:
        """Adds prompts and answers; raises an OSError if they cannot be written."""
        arrays = [(np.array(prompt, dtype=np.int32), np.array(answer, dtype=np.int32)) for prompt, answer in texts]
        with self._up_to_date(writes=True) as base:
            for prompt, answer in arrays:
                prompt = prompt[max(len(prompt) + len(answer) - self._most // 2, 0) :]
                with self._reading:
                    record = self._texts.unknown_part(prompt, answer[-(self._most // 2) :])
                if record is not None:
                    self._add(record, base)

    def _add(self, record: Record, base: sqlite3.Connection | None = None) -> None:
        """Adds a record, to the file too if it is given. If older texts have to leave, the file is written again."""
        before, texts = len(self._texts), self._texts.with_room(len(record.tokens))
        if base is not None and len(texts) < before:
            base.execute("DELETE FROM texts")
            self._write([*texts.records(), record], base)
        elif base is not None:
            self._write([record], base)
        with self._reading:
            self._texts = texts
            texts.add(record)

    def _write(self, records: Sequence[Record], base: sqlite3.Connection) -> None:
        for record in records:
            self._last = max(self._last + 1, time.time_ns())
            row = self._last, record.start, record.tokens.astype("<i4").tobytes()
            base.execute("INSERT INTO texts VALUES (?, ?, ?)", row)
        [self._first] = base.execute("SELECT min(number) FROM texts").fetchone()

    def _replace(self, texts: PastTexts) -> None:
        with self._reading:
            self._texts = texts

    def erase(self) -> None:
        """Forgets all texts, in the file too."""
        with self._changing:
            if self._path is not None:
                _erase(self._path)
            self._replace(PastTexts([], self.vocab_size, self._most))
            self.trust = Trust()


_MOST_FOLDERS = 4  # whose texts a drafter keeps in memory
_of_files: weakref.WeakValueDictionary[str, History] = weakref.WeakValueDictionary()
_lock = new_lock()


def history_of(drafter: Drafter, target: Any, option: str) -> History:
    """Returns the history that the option `history` asks for, up to date.

    In memory it is that of the drafter and the target. In a folder it is that of the target, whatever drafts.

    Raises:
        OSError: the folder cannot be used.
    """
    with _lock:
        known = _histories(drafter).setdefault(target, {})
        history = known.pop(option, None) or _made(target, option)
        known[option] = history  # the last one
        for unused in [name for name in known if name != IN_MEMORY][:-_MOST_FOLDERS]:
            del known[unused]
    history.refresh()
    return history


def _histories(drafter: Drafter) -> weakref.WeakKeyDictionary[Any, dict[str, History]]:
    """Those that a drafter has used, by target and option."""
    return kept_with(drafter, "histories", weakref.WeakKeyDictionary)


def _made(target: Any, option: str) -> History:
    vocab_size = embedded_tokens(target)
    if option == IN_MEMORY:
        return History(vocab_size)
    name, key = identity_of(target)
    path = Path(option).expanduser().absolute() / f"{name}-{key.hex()[:16]}{SUFFIX}"
    history = _of_files.get(str(path))
    if history is None:
        _check_place(path)
        history = _of_files[str(path)] = History(vocab_size, path)
    return history


def _check_place(path: Path) -> None:
    """Makes a file and its folder, which only their owner can read; raises an OSError where nothing can be written."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(ValueError), _opened(path, writes=True, makes=True):
            return
        _erase(path)  # it is damaged, or of an earlier version
    except OSError as error:
        raise OSError(f'history="{path.parent}" cannot be used ({error}): name a folder that can be written') from error


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
    """Lists for each target what a folder holds, or a drafter: in memory, or in the folder that its option names.

    Warns of files that are damaged, or of an earlier version.

    Raises:
        NotADirectoryError: there is no such folder.
        ValueError: it is the folder of a drafter, and holds no texts.
    """
    where = _place_of(where)
    if isinstance(where, Drafter):
        kept = [(identity_of(target)[0], history) for target, history in _in_memory(where)]
        return [HistoryContents(name, *history.held) for name, history in kept]
    found = []
    for path in _files(where):
        records = list[Record]()
        try:
            records = read_all(path)
        except ValueError as error:
            logger.warning(f"{error}. It is damaged, or of an earlier version, whose texts are not read any more.")
        if records:
            tokens = sum(len(record.tokens) for record in records)
            found.append(HistoryContents(_target_in(path), len(records), tokens, path.stat().st_size, path))
    return found


def erase_history(where: Drafter | str | os.PathLike[str], target: str = "") -> int:
    """Erases what a folder or a drafter holds, see `list_history`; returns how many texts.

    Processes that draft from a file drop its texts with their next call. Damaged files, and those of earlier versions,
    are removed and not counted.

    Args:
        target: name of a target, as `list_history` gives it; default: all.

    Raises:
        NotADirectoryError: there is no such folder.
        ValueError: there is no history of this target; or as `list_history`.
    """
    where = _place_of(where)
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
    for path in paths:
        if target in ("", _target_in(path)):
            with contextlib.suppress(ValueError):
                texts += len(read_all(path))
            used_here = _of_files.get(str(path))
            used_here.erase() if used_here is not None else _erase(path)
    for left in () if target else Path(where).expanduser().glob(".history*"):  # by writers of earlier versions
        left.unlink(missing_ok=True)
    return texts


def _check_known(target: str, names: Sequence[str]) -> None:
    if target and target not in names:
        raise ValueError(
            f"there is no history of {target!r}: expected one of {', '.join(names) or 'none, it is empty'}"
        )


def _place_of(where: Any) -> Any:
    """A drafter's folder of texts, if its option names one; else `where` itself."""
    option = where.generation_config.history if isinstance(where, Drafter) else None
    return where if option in (None, NO_HISTORY, IN_MEMORY) else option


def _in_memory(drafter: Drafter) -> list[tuple[Any, History]]:
    with _lock:
        kept = list(_histories(drafter).items())
    return [(target, histories[IN_MEMORY]) for target, histories in kept if IN_MEMORY in histories]


def _files(folder: str | os.PathLike[str]) -> list[Path]:
    path = Path(folder).expanduser().absolute()
    if not path.is_dir():
        raise NotADirectoryError(f"{path} is no folder: expected one that the option `history` names, or a drafter")
    found = sorted(path.glob(f"*{SUFFIX}"))
    if not found and (path / "config.json").exists():
        raise ValueError(
            f"{path} is the folder of a model or drafter, and holds no past texts: expected the folder that the option "
            "`history` names, or the loaded drafter"
        )
    return found


def _target_in(path: Path) -> str:
    return path.name.removesuffix(SUFFIX).rpartition("-")[0]
