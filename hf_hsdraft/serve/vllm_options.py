"""vLLM's server options in the forms that users write: `--name value`, `--name=value`, and with underscores."""

from __future__ import annotations

from collections.abc import Sequence


def option_name(option: str) -> str:
    """Returns the name of an option as vLLM's documentation writes it; vLLM accepts underscores too."""
    return option.partition("=")[0].replace("_", "-")


def option_value(options: Sequence[str], *names: str) -> str | None:
    """Returns the last value given for an option with any of the names; `None` if it was not given."""
    found = None
    for place, option in enumerate(options):
        if option_name(option) in names:
            _, joined, value = option.partition("=")
            found = value if joined else "".join(options[place + 1 : place + 2])
    return found
