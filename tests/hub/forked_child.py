"""Runs code in forks of a process that has imported what it needs; `python forked_child.py` is that process.

Each order is a line of JSON: the code, whether the package may be imported, the home of the Hub's client, environment
variables. Each answer is one too: the exit status, and what the fork has printed.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

# What code starts with; `tokens` decodes greedily with whatever is given.
START = """
import json, sys, time, torch
time.sleep = lambda seconds: None  # the client waits between its attempts
from transformers import AutoModel, AutoModelForCausalLM
target = AutoModelForCausalLM.from_pretrained("target").eval()
ids = torch.tensor([[5, 6, 7, 8]])
def tokens(**kwargs):
    return target.generate(ids, max_new_tokens=12, do_sample=False, **kwargs)[0].tolist()
def outcome(call):
    try:
        return ["ok", call()]
    except Exception as error:
        return [type(error).__name__, str(error)]
def answer(value):
    print("ANSWER " + json.dumps(value))
"""
PACKAGE = "from hf_hsdraft import AutoDrafter, BlockDrafter, HSDrafter\n"


class Forks:
    """A process that runs code in forks, in `folder`."""

    def __init__(self, folder: Path, package: bool, **environment: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, *["package"] * package], cwd=folder, env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def run(self, code: str, home: Path, **environment: str) -> tuple[int, str]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([code, str(home), environment]) + "\n")
        self._process.stdin.flush()
        return tuple(json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        self._process.communicate()


def _fork(code: str, home: str, environment: dict[str, str], output: Any) -> None:
    """Runs code in this process, which ends with it, as if it had been started with that home of the Hub's client."""
    from huggingface_hub import constants
    from huggingface_hub.utils import _cache_manager

    for number in (1, 2):
        os.dup2(output.fileno(), number)
    os.environ.update(environment)
    constants.HF_HOME, constants.HF_TOKEN_PATH = home, f"{home}/token"
    constants.HF_HUB_CACHE = _cache_manager.HF_HUB_CACHE = f"{home}/hub"
    constants.HF_HUB_OFFLINE = "HF_HUB_OFFLINE" in environment
    status = 1
    try:
        exec(code, {"__name__": "__main__"})
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def main(package: bool) -> None:
    answers, sys.stdout = sys.stdout, sys.stderr
    from transformers import AutoModel, AutoModelForCausalLM  # noqa: F401
    from transformers.models.llama import modeling_llama  # noqa: F401

    if package:
        exec(PACKAGE + "import hf_hsdraft.cli.main", {})
    for line in sys.stdin:
        code, home, environment = json.loads(line)
        with tempfile.TemporaryFile("w+") as output:
            if (child := os.fork()) == 0:
                sys.stdout = os.fdopen(1, "w", closefd=False)
                _fork(code, home, environment, output)
            _, status = os.waitpid(child, 0)
            output.seek(0)
            print(json.dumps([status, output.read()]), file=answers, flush=True)


if __name__ == "__main__":
    main("package" in sys.argv[1:])
