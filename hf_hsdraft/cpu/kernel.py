"""Operators in C++ that this machine's compiler makes once, in the background.

Until they are made, and where there is no compiler or another processor, there are none, and everything works without.
They are tried once a process, like torch's private operators.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import sys
import threading
import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from ..core.cache_folder import is_own, private_folder
from ..core.forks import new_lock
from .background import start_compiler
from .private_operators import works

logger = logging.get_logger(__name__)

_FLAGS = ("-std=c++20", "-O3", "-falign-loops=64", "-fPIC", "-shared", "-fopenmp", "-w")  # else loops take up to 1.6x
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16")


class Kernel:
    """Compiles and loads the operators of a source once for a process. Thread-safe.

    Args:
        source: for Linux on x86-64 with AVX2, or with AVX-512 and its bfloat16. Defines a library of the name
            `HSDRAFT_LIBRARY` with an operator `runs_here`.
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
                    wait = wait or is_own(self._file)  # it only loads
            if wait:
                self._thread.join()
        return self._found

    @property
    def may_come(self) -> bool:
        """Whether operators that are not there yet may be later."""
        begun = self._process == os.getpid()
        return self._found is None and self._may_run and (not begun or self._thread.is_alive())

    def _run(self, at_once: bool) -> None:
        try:
            while not is_own(self._file) and self._compile(at_once):  # another process may make it too
                time.sleep(1.0)
            if not is_own(self._file):
                raise OSError(f"{self._file} was not compiled, or others can write to it")
            torch.ops.load_library(str(self._file))
        except (OSError, RuntimeError) as error:
            logger.info(f"No {self._what} on this machine: {error}")
            return
        found = getattr(torch.ops, self._library)
        if found.runs_here() and works(self._what, lambda: self._trial(found)):
            self._found = found

    @cached_property
    def _may_run(self) -> bool:
        of_this_kind = sys.platform == "linux" and platform.machine() == "x86_64"
        if not of_this_kind or torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
            return False  # before a compiler works in vain
        try:
            return is_own(self._file) or cpp_compiler() is not None
        except OSError as error:
            logger.info(f"No {self._what} on this machine: {error}")
            return False

    @cached_property
    def _flags(self) -> tuple[str, ...]:
        wide = torch.backends.cpu.get_cpu_capability() == "AVX512"
        wide = wide and "avx512_bf16" in Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
        return *_FLAGS, *(_AVX512 if wide else _AVX2)

    @cached_property
    def _library(self) -> str:
        files = self._source, *sorted(self._source.parent.glob("*.h"))  # it includes these
        parts = torch.__version__, *self._flags, *(file.read_text(encoding="utf-8") for file in files)
        return f"hsdraft_{hashlib.sha256(chr(10).join(parts).encode()).hexdigest()[:16]}"

    @cached_property
    def _file(self) -> Path:
        return private_folder("kernels") / f"{self._source.stem}-{self._library}.so"

    def _compile(self, at_once: bool) -> bool:
        """Compiles the operators, or returns True while another compiler has its turn."""
        compiler = cpp_compiler()
        if compiler is None:
            raise OSError("no C++ compiler")
        partial, of_torch = self._file.with_suffix(f".{os.getpid()}"), Path(torch.__file__).parent
        places = [f"-I{of_torch / 'include'}", f"-I{of_torch / 'include/torch/csrc/api/include'}"]
        # A shell renames the result, also after the end of a process that did not wait for it. It is on disk before: a
        # file that a crash of the machine has cut off would end each process that loads it.
        script = 'umask 077; made=$1; shift; "$@" && { sync "$made"; mv -f "$made" "$0"; }'
        command = ["sh", "-c", script, str(self._file), str(partial)]
        command += [compiler, *self._flags, f"-DHSDRAFT_LIBRARY={self._library}", *places, f"-L{of_torch / 'lib'}"]
        command += [str(self._source), "-lc10", "-ltorch_cpu", "-o", str(partial)]
        process = start_compiler(command, at_once=at_once)
        if process is not None:
            process.wait()
        return process is None


def cpp_compiler() -> str | None:
    """The path of a C++ compiler: `$CXX`, or the first that is installed."""
    return next(filter(None, map(shutil.which, (os.environ.get("CXX", "g++"), "clang++", "c++"))), None)
