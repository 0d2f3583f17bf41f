"""`hsdraft serve --engine vllm`: starts vLLM's server with a drafter, after checks. vLLM has a separate environment."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from ..core.checks import printable
from ..hub.checkpoint import Checkpoint
from ..hub.drafter_files import weight_files
from ..runtime.target_limits import decoder_layers
from ..runtime.target_loading import DEFAULT_TARGET, target_folder
from .speculation import CPU_MEMORY, NGRAMS, is_hidden_state, speculation_of

_MOST_BATCHED = "--max-num-batched-tokens"
_MEMORY = "--gpu-memory-utilization"  # vLLM's name on a CPU too
# Without the current folder: a checkout there may not be installed.
_FIND_VLLM = """
import sys
sys.path[:] = [folder for folder in sys.path if folder]
import vllm
"""
_FIND_PLUGIN = """
from importlib.metadata import entry_points
if not entry_points(group="vllm.general_plugins", name="hsdraft"):
    sys.exit("hf_hsdraft is not installed there, so vLLM does not find its plugin")
"""
_FOUND = "vLLM is there"  # printed by the interpreter, if it is one
_PARALLEL = (("--tensor-parallel-size", "-tp"), ("--pipeline-parallel-size", "-pp"))


def option_value(options: Sequence[str], *names: str) -> str | None:
    """Returns the last value given for an option with any of the names; `None` if it was not given.

    Users write vLLM's options as `--name value` or `--name=value`, also with underscores in the name.
    """
    found = None
    for place, option in enumerate(options):
        name, joined, value = option.partition("=")
        if name.replace("_", "-") in names:
            found = value if joined else "".join(options[place + 1 : place + 2])
    return found


def check_environment(python: str | os.PathLike[str] | None, with_plugin: bool) -> None:
    """Raises an ImportError unless the interpreter `python` finds vLLM, and this package's plugin if `with_plugin`."""
    how = (
        'set one up by `python3 -m venv vllm && vllm/bin/pip install vllm "transformers<5.20" && vllm/bin/pip install '
        "--no-deps .` in a checkout (on CPUs see docs/integrations.md), then name it by --vllm-python vllm/bin/python"
    )
    if python is None:
        raise ImportError(f"vLLM needs a separate environment with an older transformers: {how}")
    code = _FIND_VLLM + (_FIND_PLUGIN if with_plugin else "") + f"print({_FOUND!r})\n"
    try:
        found = subprocess.run([os.fspath(python), "-c", code], capture_output=True, text=True, check=False)
    except OSError as error:
        raise ImportError(f"{python} cannot be started ({error.strerror}): {how}") from None
    if found.returncode:
        why = printable((found.stderr.strip().splitlines() or ["no reason given"])[-1])
        wanted = "vLLM and this package" if with_plugin else "vLLM"
        raise ImportError(f"{python} does not find {wanted} ({why}): {how}")
    if _FOUND not in found.stdout:
        raise ImportError(f"{python} is no Python interpreter: {how}")


def check_parallel(drafter: Mapping[str, Any], further: Sequence[str]) -> None:
    """Raises a ValueError if the options `further` shard a target over devices with a hidden-state drafter."""
    for names in _PARALLEL if is_hidden_state(drafter) else ():
        value = option_value(further, *names)
        if value not in (None, "1"):
            raise ValueError(
                f"{names[0]} {printable(value)} does not go with a hidden-state drafter, which needs the target whole "
                "on one device: leave it out, or draft by n-grams (--drafter ngrams)"
            )


def check_target(target: str, drafter: Mapping[str, Any]) -> None:
    """Raises a ValueError if a target differs in size from the one that a drafter was trained for.

    A target that this version of transformers does not know is left to vLLM.
    """
    try:
        config = AutoConfig.from_pretrained(target).get_text_config(decoder=True)
    except ValueError:
        return
    found = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": decoder_layers(config),
    }
    sizes: dict[str, Any] = {}
    layer = drafter.get("transformer_layer_config")  # the speculators format
    if is_hidden_state(drafter):
        sizes = {"vocab_size": drafter.get("vocab_size"), "hidden_size": drafter.get("target_hidden_size")}
        sizes["num_hidden_layers"] = drafter.get("target_num_hidden_layers")
    elif isinstance(layer, dict):
        hidden = drafter.get("target_hidden_size") or layer.get("hidden_size")
        sizes = {"vocab_size": layer.get("vocab_size"), "hidden_size": hidden}
    for name, expected in sizes.items():
        if expected is not None and found[name] != expected:
            raise ValueError(
                f"the target {target} has {name}={found[name]}, the drafter expects {printable(expected)}: it was "
                "trained for another target. Name that one by --target, or a drafter of this target by --drafter"
            )


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

    `python` is the interpreter of vLLM's environment, `speculation` is `None` for plain decoding, `served_name` is what
    clients call the target, and `further` are options for vLLM.
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


def checked_command(
    python: str | os.PathLike[str] | None,
    target: str | None,
    drafter: str | None,
    num_speculative_tokens: int | None,
    *,
    dtype: torch.dtype,
    on_cpu: bool,
    further: Sequence[str],
    **server: Any,
) -> list[str]:
    """Returns the command of `server_command` for names of `hsdraft serve`; fetches the target and the drafter.

    `drafter` is `None` for plain decoding. Raises an ImportError, OSError or ValueError for what vLLM cannot serve,
    minutes before vLLM would.
    """
    speculation = None
    if drafter is not None:
        speculation = speculation_of(drafter, num_speculative_tokens, on_cpu=on_cpu)
    config = {} if drafter in (None, NGRAMS) else Checkpoint.open(str(drafter)).config
    if config and os.path.isdir(str(drafter)):
        weight_files(Path(str(drafter)))
    check_parallel(config, further)
    check_environment(python, with_plugin=drafter == NGRAMS or is_hidden_state(config))
    folder = target_folder(target, dtype)
    check_target(folder, config)
    served, number = target or DEFAULT_TARGET, str(dtype).removeprefix("torch.")
    return server_command(
        str(python), folder, speculation, served_name=served, dtype=number, on_cpu=on_cpu, further=further, **server
    )


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
