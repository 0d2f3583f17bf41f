"""Checks of `hsdraft serve --engine vllm` before vLLM starts."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import AutoConfig

from ..core.checks import printable
from ..runtime.target_limits import decoder_layers
from ..vllm_plugin.speculation import is_hidden_state
from .vllm_options import option_value

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


def check_environment(python: str | os.PathLike[str] | None, with_plugin: bool) -> None:
    """Raises an ImportError unless the interpreter `python` finds vLLM, and this package's plugin if `with_plugin`."""
    how = (
        'set one up by `python3 -m venv vllm && vllm/bin/pip install vllm "transformers<5.20" && vllm/bin/pip install '
        "--no-deps .` in a checkout (on CPUs see docs/integrations.md), then name it by --vllm-python vllm/bin/python"
    )
    if python is None:
        raise ImportError(f"vLLM needs an environment of its own, for it wants an older transformers: {how}")
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
    for name, expected in _target_sizes(drafter).items():
        if expected is not None and found[name] != expected:
            raise ValueError(
                f"the target {target} has {name}={found[name]}, the drafter expects {printable(expected)}: it was "
                "trained for another target. Name that one by --target, or a drafter of this target by --drafter"
            )


def _target_sizes(drafter: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes of a drafter's target according to its config.json; `None` for missing ones."""
    if is_hidden_state(drafter):
        return {
            "vocab_size": drafter.get("vocab_size"),
            "hidden_size": drafter.get("target_hidden_size"),
            "num_hidden_layers": drafter.get("target_num_hidden_layers"),
        }
    layer = drafter.get("transformer_layer_config")  # the speculators format
    if not isinstance(layer, dict):
        return {}
    return {
        "vocab_size": layer.get("vocab_size"),
        "hidden_size": drafter.get("target_hidden_size") or layer.get("hidden_size"),
    }
