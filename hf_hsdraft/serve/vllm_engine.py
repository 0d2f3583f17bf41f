"""`hsdraft serve --engine vllm`: vLLM's own server, started with a drafter. vLLM lives in an environment of its own."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import AutoConfig

from ..vllm_plugin.plugin_limits import CPU_MEMORY
from .vllm_options import option_value

_MOST_BATCHED = "--max-num-batched-tokens"
_MEMORY = "--gpu-memory-utilization"  # vLLM calls it so on a CPU too


def server_command(
    python: str | os.PathLike[str],
    target: str,
    speculation: Mapping[str, Any] | None,
    *,
    served_name: str,
    dtype: str,
    host: str,
    port: int,
    on_cpu: bool,
    further: Sequence[str] = (),
) -> list[str]:
    """Returns the command that starts vLLM's server.

    On a CPU it asks for three things. Nothing is compiled. A prompt is read in one piece: vLLM 0.32 ends there when a
    request with a seed has its prompt read in parts. And half of the memory is taken: vLLM's default of 92% ends it
    where other programs hold more than the rest. `further` can ask otherwise.

    Args:
        python: the interpreter of vLLM's environment.
        target: folder or Hub name of the target.
        speculation: see `speculation_of`; `None` for plain decoding.
        served_name: what clients call the target.
        dtype: name of a dtype.
        host: name or address to listen at.
        port: port to listen at.
        on_cpu: whether vLLM runs on a CPU.
        further: options for vLLM.
    """
    command = [os.fspath(python), "-m", "vllm.entrypoints.openai.api_server", "--model", target]
    command += ["--served-model-name", served_name, "--dtype", dtype, "--host", host, "--port", str(port)]
    if on_cpu:
        command += ["--enforce-eager", "--no-enable-chunked-prefill"]
        if option_value(further, _MOST_BATCHED) is None:
            command += [_MOST_BATCHED, str(_window(target, further))]
        if option_value(further, _MEMORY, "--device-memory-utilization") is None:
            command += [_MEMORY, str(CPU_MEMORY)]
    if speculation is not None:
        command += ["--speculative-config", json.dumps(dict(speculation))]
    return [*command, *further]


def _window(target: str, further: Sequence[str]) -> int:
    """The greatest number of tokens of a text, which a batch has to hold.

    vLLM takes other forms of `--max-model-len` than plain numbers, such as `8k`, `auto` and `-1`. What these come to is
    left to it, and the window of the target holds as much.
    """
    said = option_value(further, "--max-model-len") or ""
    if said.isdecimal():
        return int(said)
    config = AutoConfig.from_pretrained(target).get_text_config()
    return max(int(getattr(config, "max_position_embeddings", 0) or 0), 2048)
