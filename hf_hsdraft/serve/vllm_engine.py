"""`hsdraft serve --engine vllm`: starts vLLM's server with a drafter. vLLM has a separate environment."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import AutoConfig

from ..vllm_plugin.plugin_limits import CPU_MEMORY
from .vllm_options import option_value

_MOST_BATCHED = "--max-num-batched-tokens"
_MEMORY = "--gpu-memory-utilization"  # vLLM's name on a CPU too


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

    On a CPU it sets three defaults, which `further` can override. Nothing is compiled. A prompt is read in one piece:
    vLLM 0.32 exits if the prompt of a request with a seed is read in parts. Half of the memory is used: vLLM's default
    of 92% fails if other programs hold more than the rest.

    Args:
        python: the interpreter of vLLM's environment.
        speculation: see `speculation_of`; `None` for plain decoding.
        served_name: what clients call the target.
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
    """The maximum number of tokens of a text, which a batch has to hold.

    vLLM also takes values of `--max-model-len` such as `8k`, `auto` and `-1`. These are left to vLLM; the target's
    window is large enough.
    """
    said = option_value(further, "--max-model-len") or ""
    if said.isdecimal():
        return int(said)
    config = AutoConfig.from_pretrained(target).get_text_config()
    return max(int(getattr(config, "max_position_embeddings", 0) or 0), 2048)
