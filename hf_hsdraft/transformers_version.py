"""Which transformers is installed, and whether the package was tested with it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import transformers
from packaging.version import Version

NEEDED = (5, 23)
TESTED = (5, 24)  # the newest; constraints.txt and .ci/matrix.py name it too


def needs_newer() -> str | None:
    """Returns why only the vLLM plugin works with the installed transformers; `None` if the whole package does."""
    if Version(transformers.__version__).release >= NEEDED:
        return None
    return (
        f"transformers {transformers.__version__} is installed, and drafting in generate(), training and the commands "
        f"need {_named(NEEDED)} or newer. Only hf_hsdraft.vllm_plugin, the plugin for vLLM, works here: install a "
        "newer transformers in a separate environment"
    )


@contextmanager
def untested() -> Iterator[None]:
    """Around what hooks into transformers: warns after it if transformers is newer than the tests' newest.

    Raises an ImportError that says so where the hooks did not fit.
    """
    if Version(transformers.__version__).release[:2] <= TESTED:
        yield
        return
    installed = f"transformers {transformers.__version__} is installed, and hf_hsdraft was tested with"
    tested = f"{installed} {_named(NEEDED)} to {_named(TESTED)}"
    remedy = f"Install 'transformers<{TESTED[0]}.{TESTED[1] + 1}', or a newer hf_hsdraft."
    try:
        yield
    except ImportError as error:
        raise ImportError(f"{tested}. Drafting does not fit it ({error}). {remedy}") from error
    warnings.warn(f"{tested}: drafted texts may differ from plain ones, or calls may fail. {remedy}", stacklevel=6)


def _named(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
