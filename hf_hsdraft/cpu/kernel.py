"""Operators in C++ that come compiled with an installation, or that this machine's compiler makes in the background.

Until they are made, and where there is no compiler or another processor, there are none, and everything works without.
They are tried once a process, like torch's private operators.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version
from transformers.utils import logging

from ..core.cache_folder import is_own, private_folder
from ..core.forks import new_lock
from . import kernel_files
from .background import start_compiler
from .private_operators import works

logger = logging.get_logger(__name__)


class Kernel:
    """Compiles and loads the operators of a source once for a process. Thread-safe.

    Args:
        source: defines a library of the name `HSDRAFT_LIBRARY` with an operator `runs_here`.
        what: its name in messages.
        trial: whether the operators, which it is given, are right.
    """

    def __init__(self, source: Path, what: str, trial: Callable[[Any], bool]) -> None:
        self._source, self._what, self._trial = source, what, trial
        self._thread, self._process = threading.Thread(), 0  # which loads, and in which process
        self._starting = new_lock()
        self._found: Any = None

    def operators(self, wait: bool = False) -> Any:
        """The namespace of the operators; `None` where they do not run, or are not made yet.

        Args:
            wait: until a compiler has made them, about 20 seconds.
        """
        if self._found is None and self._may_run:
            with self._starting:
                if self._process != os.getpid():  # a forked child has no threads of its parent
                    thread = threading.Thread(target=self._run, args=(wait,), name="hsdraft-kernel", daemon=True)
                    try:
                        thread.start()
                    except RuntimeError:  # no more threads may be started
                        return None
                    self._thread, self._process = thread, os.getpid()
                    wait = wait or self._is_made  # it only loads
            if wait:
                self._thread.join()
        return self._found

    @property
    def may_come(self) -> bool:
        """Whether operators that are not there yet may be later."""
        return self._found is None and self._may_run and (self._process != os.getpid() or self._thread.is_alive())

    def _run(self, at_once: bool) -> None:
        try:
            while not self._is_made and self._compile(at_once):  # another process may make it too
                time.sleep(1.0)
            if not self._is_made:
                raise OSError(f"{self._file} was not compiled, or others can write to it")
            torch.ops.load_library(str(self._file))
            found = getattr(torch.ops, self._file.stem)
            runs = found.runs_here()
        except (OSError, RuntimeError, AttributeError) as error:  # the last where this torch lacks what it asks for
            logger.info(f"No {self._what} on this machine: {error}")
            return
        if runs and works(self._what, lambda: self._trial(found)):
            self._found = found

    @cached_property
    def _may_run(self) -> bool:
        try:
            if not self._flags or Version(torch.__version__).release < (2, 10):  # with the interface of torch_abi.h
                return False
            return self._is_made or kernel_files.cpp_compiler() is not None
        except OSError as error:
            logger.info(f"No {self._what} on this machine: {error}")
            return False

    @cached_property
    def _flags(self) -> Sequence[str]:
        used, flags = torch.backends.cpu.get_cpu_capability(), kernel_files.processor_flags()
        return () if used not in ("AVX2", "AVX512") else flags if used == "AVX512" else flags and kernel_files.AVX2

    @cached_property
    def _file(self) -> Path:
        installed = self._source.with_name(f"{kernel_files.library_of(self._source, self._flags)}.so")
        return installed if installed.exists() else private_folder("kernels") / installed.name

    @property
    def _is_made(self) -> bool:
        return self._file.parent == self._source.parent or is_own(self._file)

    def _compile(self, at_once: bool) -> bool:
        """Compiles the operators, or returns True while another compiler has its turn."""
        compiler, partial = kernel_files.cpp_compiler(), self._file.with_suffix(f".{os.getpid()}")
        if compiler is None:
            raise OSError("no C++ compiler")
        # A shell renames the result, also after the end of a process that did not wait for it. It is on disk before: a
        # file that a crash of the machine has cut off would end each process that loads it.
        script = 'umask 077; made=$1; shift; "$@" && { sync "$made"; mv -f "$made" "$0"; }'
        made = kernel_files.command(compiler, self._source, self._flags, partial)
        process = start_compiler(["sh", "-c", script, str(self._file), str(partial), *made], at_once=at_once)
        if process is not None:
            process.wait()
        return process is None
