"""Which transformers is installed, and whether the whole package works with it."""

from __future__ import annotations

import transformers
from packaging.version import Version

NEEDED = (5, 23)


def needs_newer() -> str | None:
    """Returns why only the parts for vLLM work with the installed transformers; `None` if all of the package does."""
    if Version(transformers.__version__).release >= NEEDED:
        return None
    needed = ".".join(map(str, NEEDED))
    return (
        f"transformers {transformers.__version__} is installed, and drafting in generate(), training and the commands "
        f"need {needed} or newer. Only hf_hsdraft.vllm_plugin, the plugin for vLLM, works here: install a newer "
        "transformers in an environment of its own"
    )
