"""Programs of decoder layers: found on disk, or compiled by another process while this one continues without them."""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import os
import pickle
import platform
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers.utils import logging

from ..core.cache_folder import check_temporary_folders, is_own, private_folder
from ..core.forks import new_lock, new_rlock
from .background import COMPILING_SECONDS, start_compiler
from .kernel_files import cpp_compiler
from .layer_form import Form
from .layer_operators import Step, running

# Number of forwards in a process after which its layers are compiled - by hand: the compiler takes one core about a
# minute, and a forward gets quicker by a third.
COMPILING_FORWARDS = 100
COMPILING_LOOKS = 8  # number of forwards between two looks for a program - by hand: a look takes 0.3 ms

logger = logging.get_logger(__name__)
METADATA = "hf_hsdraft"  # key in a compiled package
_ALONE = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}  # it starts no other processes that stay


@dataclass(frozen=True)
class Needs:
    """What runs a program has to know about the layer.

    Attributes:
        weights: names of the parameters and buffers that the program reads, its first inputs.
        products: names of the linear layers of each product, which are joined as they read the same input.
        index_of: name of the module whose `layer_idx` the cache is given.
        returns_tuple: whether the layer returns a tuple of tensors.
    """

    weights: Sequence[str]
    products: Sequence[Sequence[str]]
    index_of: str
    returns_tuple: bool


class Program:
    """A compiled layer, for any layer of its description in any of its calls' sizes."""

    def __init__(self, package: Path) -> None:
        load: Any = torch._C._aoti.AOTIModelPackageLoader  # what `aoti_load_package` wraps, without its imports
        self._package = load(str(package), "model", True, 1, -1)
        self.needs = Needs(**json.loads(self._package.get_metadata()[METADATA]))
        self._lock = new_rlock()  # the package runs for a single thread

    def __call__(self, inputs: Sequence[torch.Tensor], step: Step) -> Any:
        """The layer's outputs. `inputs` are its weights, and the tensors of its call."""
        before, running.step = running.step, step
        try:
            with self._lock:
                outputs = self._package.boxed_run(list(inputs))
        except RuntimeError:
            if step.error is not None:  # such as an interrupt
                raise step.error from None
            raise
        finally:
            running.step = before
        return tuple(outputs) if self.needs.returns_tuple else outputs[0]


@dataclass
class Entry:
    """Where the program for one description and form stands.

    Attributes:
        tried: the sizes for which it has been compared with the layer: whether there are several texts, and tokens.
        why_not: why there will be none in this process.
    """

    key: str
    program: Program | None = None
    tried: set[tuple[bool, bool]] = field(default_factory=set)
    why_not: str = ""
    _forwards: int = 0
    _compiler: subprocess.Popen[bytes] | None = None
    _advancing: threading.Lock = field(default_factory=new_lock)

    def after_forward(self, layer: nn.Module, form: Form, at_once: bool) -> bool:
        """Counts a forward without a program; returns whether there is one now. `at_once` compiles and waits."""
        with self._advancing:
            if self.program is not None or self.why_not:
                return False
            try:
                return self._advance(layer, form, at_once)
            except (OSError, RuntimeError, ValueError, subprocess.SubprocessError) as error:  # of folder or process
                self.why_not = f"{type(error).__name__}: {error}"
                return False

    def _advance(self, layer: nn.Module, form: Form, at_once: bool) -> bool:
        self._forwards += 1
        if self._forwards % COMPILING_LOOKS != 1 and not at_once:
            return False
        package = private_folder("layers") / f"{self.key}.pt2"
        if not is_own(package):
            if self._compiler is None:
                if self._forwards < COMPILING_FORWARDS and not at_once:
                    return False
                able = sys.executable and cpp_compiler()
                self.why_not = _reason(package) or ("" if able else "there is no C++ compiler")
                self._compiler = None if self.why_not else _compiler(layer, form, package, at_once)
                if self._compiler is None:  # it has to wait for its turn, maybe for this very program
                    return False
            if at_once:
                self._compiler.wait(COMPILING_SECONDS)
            if self._compiler.poll() is None:
                return False
            if not is_own(package):
                self.why_not = _reason(package) or "the compiler was interrupted"
                return False
        check_temporary_folders()  # the program is unpacked there
        return self._load(package)

    def _load(self, package: Path) -> bool:
        try:
            self.program = Program(package)
        except Exception as error:  # of another torch, or cut short
            self.why_not = f"{package} cannot be loaded: {error}"
            logger.warning_once(f"{self.why_not}. Layers run as they are; remove the file to compile it again.")
        return self.program is not None


_entries: dict[str, Entry] = {}
_lock = new_lock()


def entry_of(description: str, form: Form) -> Entry:
    """The one entry of this process for a layer's description and a form of its calls."""
    parts = (description, repr(form), torch.get_num_threads(), *_of_this_process())
    key = hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:32]
    with _lock:
        return _entries.setdefault(key, Entry(key))


def _compiler(layer: nn.Module, form: Form, package: Path, at_once: bool) -> subprocess.Popen[bytes] | None:
    """As `start_compiler`, for a layer; raises a ValueError if it cannot be handed over."""
    if any(type(module).__module__ == "__main__" for module in layer.modules()):
        raise ValueError("another process cannot import its class from the program that runs")

    def request() -> bytes:
        try:
            return pickle.dumps((str(package), torch.get_num_threads(), form, _without_weights(layer)))
        except Exception as error:  # whatever a class of other libraries raises
            raise ValueError(f"it cannot be pickled: {error}") from error

    # Nothing is imported from the current folder that this process would not import from there.
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    command = [sys.executable, "-P", "-m", f"{__package__}.layer_compiler"]
    return start_compiler(command, request, at_once, PYTHONPATH=paths, CUDA_VISIBLE_DEVICES="", **_ALONE)


@functools.cache
def _of_this_process() -> tuple[Any, ...]:
    """What a package depends on besides the layer: libraries, the code that compiles, and the processor."""
    code = [Path(__file__).with_name(f"layer_{name}.py").read_bytes() for name in ("compiler", "form", "operators")]
    processor = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else platform.processor()
    return torch.__version__, transformers.__version__, hashlib.sha256(b"".join(code)).hexdigest(), processor


def _reason(package: Path) -> str:
    """Why a compiler made no package, as it has noted; empty if it has not tried."""
    noted = package.with_suffix(".failed")
    return noted.read_text(encoding="utf-8", errors="replace") if noted.exists() else ""


def _without_weights(layer: nn.Module) -> nn.Module:
    """A copy whose weights have shapes and types only, and without hooks."""
    memo: dict[int, Any] = {id(buffer): buffer.detach().to("meta") for buffer in layer.buffers()}
    for weight in layer.parameters():
        memo[id(weight)] = nn.Parameter(weight.detach().to("meta"), False)
    for module in layer.modules():  # hooks may hold the whole model
        memo |= {id(value): type(value)() for name, value in vars(module).items() if name.endswith("_hooks")}
    return copy.deepcopy(layer, memo)
