"""`hsdraft serve --engine vllm`: vLLM's own server, started with a drafter. vLLM lives in an environment of its own."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import AutoConfig

_FOUND = "import vllm, hf_hsdraft.vllm_plugin.registration"
_MOST_BATCHED = "--max-num-batched-tokens"


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

    On a CPU it asks for two things. Nothing is compiled, and a prompt is read in one piece: vLLM 0.32 ends there when a
    request with a seed has its prompt read in parts. `further` can ask otherwise.

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
        if not any(_option_name(each) == _MOST_BATCHED for each in further):
            command += [_MOST_BATCHED, str(_window(target, further))]
    if speculation is not None:
        command += ["--speculative-config", json.dumps(dict(speculation))]
    return [*command, *further]


def check_environment(python: str | os.PathLike[str] | None) -> None:
    """Raises an ImportError unless an interpreter finds vLLM and the plugin of this package; `None` finds nothing."""
    how = (
        'set one up by `python3 -m venv vllm && vllm/bin/pip install vllm "transformers<5.20" && vllm/bin/pip install '
        "--no-deps hf-hsdraft` (on CPUs see docs/integrations.md), then name it by --vllm-python vllm/bin/python"
    )
    if python is None:
        raise ImportError(f"vLLM needs an environment of its own, for it wants an older transformers: {how}")
    try:
        found = subprocess.run([os.fspath(python), "-c", _FOUND], capture_output=True, text=True, check=False)
    except OSError as error:
        raise ImportError(f"{python} cannot be started ({error.strerror}): {how}") from None
    if found.returncode:
        why = (found.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise ImportError(f"{python} does not find vLLM and this package ({why}): {how}")


def _window(target: str, further: Sequence[str]) -> int:
    """The greatest number of tokens of a text, which a batch has to hold.

    vLLM takes other forms of `--max-model-len` than plain numbers, such as `8k`, `auto` and `-1`. What these come to is
    left to it, and the window of the target holds as much.
    """
    for place, option in enumerate(further):
        if _option_name(option) == "--max-model-len":
            said = option.partition("=")[2] or (further[place + 1] if place + 1 < len(further) else "")
            if said.isdecimal():
                return int(said)
    config = AutoConfig.from_pretrained(target).get_text_config()
    return max(int(getattr(config, "max_position_embeddings", 0) or 0), 2048)


def _option_name(option: str) -> str:
    """Returns the name of an option as vLLM's documentation writes it; vLLM takes underscores too."""
    return option.partition("=")[0].replace("_", "-")
