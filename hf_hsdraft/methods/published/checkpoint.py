"""Checkpoints of other projects' drafters, inspected and checked before anything is allocated.

Files may be pickled, weights quantised; code is never fetched. Older files, which are pickled, have no headers, so
names and shapes are known once they are fetched.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar
from zipfile import is_zipfile

import torch

from ...core.checks import few, printable
from ...core.methods import load
from ...hub.checkpoint import Checkpoint
from ...hub.drafter_files import (
    CONFIG,
    DTYPES,
    WEIGHTS,
    DamagedFile,
    Shape,
    check_fetched,
    checked_numbers,
    header,
    mismatch,
    opened,
)

# Further dtypes, as headers name them: of quantised weights, and of what is no weight
_OTHER_DTYPES = {
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.int8: "I8", torch.uint8: "U8",
    torch.int32: "I32", torch.int64: "I64", torch.bool: "BOOL",
}  # fmt: skip
# Scales of inputs, and of keys and values, which change nothing where inputs are not quantised; and sizes.
_OF_INPUTS = (
    ".input_scale", ".input_zero_point", ".input_global_scale", ".activation_scale", ".output_scale", ".k_scale",
    ".v_scale", ".q_scale", ".weight_shape", ".bias_scale",
)  # fmt: skip
_MAPS = frozenset({"d2t", "t2d"})  # of a vocabulary
_MOST_NUMBERS = 2**40  # of a tensor; a header that says more is damaged
_PREFIX = "model."  # NeMo AutoModel's prefix of all tensors but the head's


class AnyCheckpoint(Checkpoint):
    """A folder with a configuration and weights, in any format."""

    single: ClassVar = (WEIGHTS, "medusa_lm_head.safetensors")
    pickled: ClassVar = ("pytorch_model.bin", "medusa_lm_head.pt", "hydra_lm_head.pt")

    @cached_property
    def _found(self) -> Mapping[str, tuple[Shape, str]]:
        """Shape and dtype of each tensor by its name in the files."""
        found = {
            name: (tuple(each.shape), str(each.dtype))
            for header in self._headers
            for name, each in header.tensors.items()
        }
        files = [] if self._headers else self._files
        if files and files[0].name in self.pickled:
            pickled = self._unpickled(files[0]).items()
            names = {**DTYPES, **_OTHER_DTYPES}
            return {name: (tuple(each.shape), names.get(each.dtype, str(each.dtype))) for name, each in pickled}
        for path in files:
            found |= header(path)
        for name, (shape, _) in found.items():
            if torch.Size(shape).numel() > _MOST_NUMBERS:
                raise DamagedFile(f"{self.folder}: tensor {printable(name)} has shape {list(shape)}", self.folder)
        return found

    @cached_property
    def _quantised(self) -> Any:
        """What reads quantised weights, `methods/quantised.py`; None where all tensors are plain numbers."""
        plain = all(dtype in DTYPES.values() for name, (_, dtype) in self._found.items() if name not in _MAPS)
        return None if plain else load("reading", "quantised")

    @cached_property
    def _packed(self) -> Mapping[str, Any]:
        """Quantised weights, by the stored name that they would have otherwise."""
        return {} if self._quantised is None else self._quantised.packed_weights(self._found, self.config)

    @cached_property
    def _weights(self) -> Mapping[str, tuple[Shape, str]]:
        """As `_found`, with quantised weights as they are dequantised, in place of their parts."""
        parts = {name for each in self._packed.values() for name in each.stored.values()}
        plain = {
            name: each for name, each in self._found.items() if name not in parts and not name.endswith(_OF_INPUTS)
        }
        return plain | {name: (each.shape, DTYPES[self.dtype]) for name, each in self._packed.items()}

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that quantised weights had, as config.json tells; bfloat16 if it does not."""
        named = self.config.get("dtype") or self.config.get("torch_dtype")
        return next((dtype for dtype in DTYPES if str(dtype) == f"torch.{named}"), torch.bfloat16)

    @cached_property
    def _names(self) -> Mapping[str, str]:
        """Public name of each stored name: without a prefix that a drafter's tensors may have."""
        prefix = _PREFIX if f"{_PREFIX}fc.weight" in self._weights else ""
        names = {name: name.removeprefix(prefix) for name in self._weights}
        return names if len(set(names.values())) == len(names) else {name: name for name in names}

    @cached_property
    def shapes(self) -> Mapping[str, Shape]:
        """Shape of each tensor by name, of quantised ones as they are dequantised.

        Raises an OSError if there are no weights, and a DamagedFile.
        """
        return {self._names[name]: shape for name, (shape, _) in self._weights.items()}

    @property
    def quantisation(self) -> str:
        """How the weights are quantised; empty if they are not."""
        return ", ".join(dict.fromkeys(each.scheme.name for each in self._packed.values()))

    @property
    def quantisation_unread(self) -> str:
        """Says how weights are quantised that cannot be read; empty if all can."""
        if self._quantised is None:
            return ""
        dtypes = {name: dtype for name, (_, dtype) in self._weights.items() if name not in _MAPS}
        told: str = self._quantised.unread(dtypes, self.config)
        return told

    def with_weights(self) -> Path:
        """Fetches missing weights and returns their folder. Raises an OSError if that fails, and a DamagedFile."""
        _ = self._files
        return self.folder

    def tensors(
        self, names: Collection[str] | None = None, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields tensors by name, only those in `names` if given.

        Quantised ones are dequantised to `dtype`, by default that of the checkpoint. Raises the errors of `shapes`, and
        a ValueError if the parts of a quantised one do not fit.
        """
        with self._readable() as read:
            for stored in self._weights:
                name = self._names[stored]
                if names is None or name in names:
                    packed = self._packed.get(stored)
                    yield name, read(stored) if packed is None else packed.restored(read, dtype or self.dtype)

    @contextmanager
    def _readable(self) -> Iterator[Callable[[str], torch.Tensor]]:
        """Gives a function that returns a stored tensor by name, or raises a DamagedFile."""
        files = self._files
        if files and files[0].name in self.pickled:
            pickled = self._unpickled(files[0])
            yield lambda name: checked_numbers(files[0], name, pickled[name])
            return
        with ExitStack() as stack:
            places: dict[str, tuple[Path, Any]] = {}
            for path in files:
                file = stack.enter_context(opened(path))
                places |= dict.fromkeys(file.keys(), (path, file))

            def read(name: str) -> torch.Tensor:
                path, file = places[name]
                return checked_numbers(path, name, file.get_tensor(name))

            yield read

    def check_shapes(self, expected: Mapping[str, Shape], optional: Mapping[str, Shape] | None = None) -> None:
        """Compares the tensors with the shapes that a configuration describes, and their dtypes with those of weights.

        Maps of a vocabulary may have any dtype. Raises a ValueError that names tensors that are missing, unknown or
        wrong.
        """
        dtypes = {self._names[name]: dtype for name, (_, dtype) in self._weights.items()}
        if told := self.quantisation_unread:
            raise ValueError(f"{printable(self.name)} is {told}")
        if told := mismatch(self.shapes, expected, optional):
            raise ValueError(
                f"the weights of {printable(self.name)} do not match its {CONFIG} ({told}): expected the files as "
                "they were published"
            )
        weights = sorted(expected.keys() - _MAPS)
        if wrong := [f"{name} of {dtypes[name]}" for name in weights if dtypes[name] not in DTYPES.values()]:
            raise ValueError(
                f"{printable(self.name)} has weights that are no floating-point numbers ({few(wrong)}): expected the "
                "files as they were published"
            )

    def loose_tensor(self, name: str) -> tuple[torch.Tensor, Mapping[str, Any]]:
        """Returns the one tensor of a file beside the weights, and what that says of it; a DamagedFile if none."""
        path = self.folder / name
        found = _unpickled(path)
        about = found if isinstance(found, dict) else {}
        tensor = about.get("embedding") if about else found
        if not isinstance(tensor, torch.Tensor):
            raise DamagedFile(f"{path} is damaged: expected one tensor", path)
        return tensor, about

    def _unpickled(self, path: Path) -> dict[str, torch.Tensor]:
        found = _unpickled(path)
        if not isinstance(found, dict) or not all(isinstance(value, torch.Tensor) for value in found.values()):
            raise DamagedFile(f"{path} is damaged: expected tensors by name", path)
        return found


def _unpickled(path: Path) -> Any:
    """Contents of a PyTorch file, read without running code from it.

    Files in today's layout, a zip archive, are memory-mapped; PyTorch maps no older ones.
    """
    check_fetched(path)
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zipfile(path))
    except MemoryError:
        raise
    except Exception as error:  # a damaged pickle may raise anything, even errors of seeking beyond its end
        if isinstance(error, OSError) and error.errno != errno.EINVAL:
            raise
        told = printable(error) or type(error).__name__
        raise DamagedFile(f"{path} is damaged ({told}): it is truncated or no file of PyTorch", path) from error


def speculators_type(checkpoint: Checkpoint) -> str:
    """Returns the kind of drafter that a checkpoint in this format names; empty for other formats."""
    kind = checkpoint.config.get("speculators_model_type")
    return kind if isinstance(kind, str) else ""
