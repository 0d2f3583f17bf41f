"""Which transformers is installed, and whether the package was tested with it."""

from __future__ import annotations

import warnings

import transformers
from packaging.version import Version

NEEDED = (5, 23)
TESTED = (5, 24)  # the newest; pyproject.toml and .ci/run name it too


def needs_newer() -> str | None:
    """Returns why only the vLLM plugin works with the installed transformers; `None` if the whole package does."""
    if Version(transformers.__version__).release >= NEEDED:
        return None
    return (
        f"transformers {transformers.__version__} is installed, and drafting in generate(), training and the commands "
        f"need {_named(NEEDED)} or newer. Only hf_hsdraft.vllm_plugin, the plugin for vLLM, works here: install a "
        "newer transformers in an environment of its own"
    )


def warn_if_untested() -> None:
    """Warns at import if transformers is newer than the tests' newest."""
    if Version(transformers.__version__).release[:2] > TESTED:
        warnings.warn(
            f"transformers {transformers.__version__} is installed, and hf_hsdraft was tested with {_named(NEEDED)} to "
            f"{_named(TESTED)}: drafted texts may differ from plain ones, or calls may fail. Install "
            f"'transformers<{TESTED[0]}.{TESTED[1] + 1}', or a newer hf_hsdraft.",
            stacklevel=3,
        )


def _named(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
