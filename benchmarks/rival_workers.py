"""Decodes texts greedily with one system of `rivals.py`, which runs this file with that system's own Python.

    python rival_workers.py SYSTEM CONFIG

CONFIG is JSON: `gguf`, `threads`, `longest` (tokens that a text may have), for transformers `dtype`, `drafter`,
`variant`, and for llama.cpp `repack` (whether it repacks weights for this processor). Reads orders as lines of JSON,
`{"ids": [...], "tokens": 64}`, and answers each with a line: the new tokens, seconds until the first and the last of
them, processor seconds, and the process's peak memory in bytes.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Takes a prompt's tokens, the greatest number of new ones, and a function that is called with each new token, or with
# several, as soon as they are known.
Decode = Callable[[list[int], int, Callable[..., None]], None]


def openvino(config: dict[str, Any]) -> Decode:
    """OpenVINO GenAI, as it reads the file."""
    import numpy
    import openvino
    import openvino_genai

    pipeline = openvino_genai.LLMPipeline(config["gguf"], "CPU", INFERENCE_NUM_THREADS=config["threads"])

    def decode(ids: list[int], tokens: int, arrived: Callable[..., None]) -> None:
        class Streamer(openvino_genai.StreamerBase):
            def write(self, token: Any) -> Any:
                arrived(*(token if isinstance(token, list) else [token]))
                return openvino_genai.StreamingStatus.RUNNING

            def end(self) -> None:
                pass

        inputs = [openvino.Tensor(numpy.array([row], dtype=numpy.int64)) for row in (ids, [1] * len(ids))]
        encoded = openvino_genai.TokenizedInputs(*inputs)
        pipeline.generate(encoded, max_new_tokens=tokens, do_sample=False, streamer=Streamer())

    return decode


def llama(config: dict[str, Any]) -> Decode:
    """llama.cpp by the C functions of llama-cpp-python, so that nothing but an argmax comes between two tokens."""
    import ctypes

    import llama_cpp
    import numpy

    quiet = llama_cpp.llama_log_callback(lambda *_: None)
    llama_cpp.llama_log_set(quiet, ctypes.c_void_p())
    llama_cpp.llama_backend_init()
    layout = llama_cpp.llama_model_default_params()
    layout.use_extra_bufts = config["repack"]
    model = llama_cpp.llama_model_load_from_file(config["gguf"].encode(), layout)
    sizes = llama_cpp.llama_context_default_params()
    sizes.n_ctx, sizes.n_batch = config["longest"], config["longest"]
    sizes.n_threads = sizes.n_threads_batch = config["threads"]
    context = llama_cpp.llama_init_from_model(model, sizes)
    vocabulary = llama_cpp.llama_model_get_vocab(model)
    size = llama_cpp.llama_vocab_n_tokens(vocabulary)

    def next_token(ids: list[int]) -> int:
        tokens = (llama_cpp.llama_token * len(ids))(*ids)  # the batch only points to them
        if llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(tokens, len(ids))):
            raise RuntimeError("llama_decode failed")
        logits = llama_cpp.llama_get_logits_ith(context, -1)
        return int(numpy.ctypeslib.as_array(logits, (size,)).argmax())

    def decode(ids: list[int], tokens: int, arrived: Callable[..., None], _kept: Any = quiet) -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        last = list(ids)
        for _ in range(tokens):
            token = next_token(last)
            arrived(token)
            if llama_cpp.llama_vocab_is_eog(vocabulary, token):
                break
            last = [token]

    return decode


def transformers(config: dict[str, Any]) -> Decode:
    """transformers' `generate()` with and without a drafter."""
    import torch
    from transformers import CompileConfig
    from transformers.generation.streamers import BaseStreamer
    from transformers.utils.logging import disable_progress_bar

    from hf_hsdraft import AutoDrafter, load_target
    from hf_hsdraft.cpu.packed_weights import PackedWeights, linears_to_pack

    disable_progress_bar()
    torch.set_num_threads(config["threads"])
    dtype, variant = getattr(torch, config["dtype"]), config["variant"]
    target = in_int8(config["gguf"], dtype) if variant.startswith("int8") else load_target(config["gguf"], dtype)[0]
    call: dict[str, Any] = {"do_sample": False}
    if variant.endswith("drafted"):
        call["assistant_model"] = AutoDrafter.from_pretrained(config["drafter"], dtype=dtype)
    elif variant == "lookup":
        call["prompt_lookup_num_tokens"] = 10
    elif variant in ("compiled", "frozen"):
        torch._inductor.config.freezing = variant == "frozen"
        compiling = CompileConfig(mode="default", fullgraph=True)
        compiling._compile_all_devices = True
        call |= {"cache_implementation": "static", "max_cache_len": config["longest"], "compile_config": compiling}

    def decode(ids: list[int], tokens: int, arrived: Callable[..., None]) -> None:
        class Streamer(BaseStreamer):
            prompt = True

            def put(self, value: torch.Tensor) -> None:
                if not self.prompt:
                    arrived(*value.flatten().tolist())
                self.prompt = False

            def end(self) -> None:
                pass

        row = torch.tensor([ids])
        inputs = {"input_ids": row, "attention_mask": torch.ones_like(row)}
        target.generate(**inputs, **call, max_new_tokens=tokens, streamer=Streamer())

    if variant != "packed":
        return decode
    copies = PackedWeights(linears_to_pack(target, True))

    def decode_packed(*order: Any) -> None:
        with copies.in_use():
            decode(*order)

    return decode_packed


def in_int8(gguf: str, dtype: Any) -> Any:
    """Returns the target with 8-bit weights by torchao, activations as they are."""
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import AutoModelForCausalLM, TorchAoConfig

    from hf_hsdraft.runtime.target_loading import target_folder

    quantised = TorchAoConfig(quant_type=Int8WeightOnlyConfig())
    folder = target_folder(gguf, dtype)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, quantization_config=quantised).eval()


def answer(decode: Decode, order: dict[str, Any]) -> dict[str, Any]:
    found: list[int] = []
    times: list[float] = []

    def arrived(*tokens: int) -> None:
        found.extend(tokens)
        times.append(time.perf_counter())

    begin, worked = time.perf_counter(), time.process_time()
    decode(order["ids"], order["tokens"], arrived)
    seconds = {"first": times[0] - begin, "last": times[-1] - begin, "processor": time.process_time() - worked}
    return {"tokens": found, **seconds, "peak": peak_memory()}


def peak_memory() -> int | None:
    """Peak resident bytes of this process; `None` where the system does not report them."""
    status = Path("/proc/self/status")
    lines = status.read_text(encoding="ascii", errors="replace").splitlines() if status.is_file() else []
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM")), None)


def main() -> None:
    system, config = sys.argv[1], json.loads(sys.argv[2])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    decode = {"openvino": openvino, "llama": llama, "transformers": transformers}[system](config)
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(decode, json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
