"""Options of vLLM's server as a user gives them: `--name value`, `--name=value`, and with underscores."""

from __future__ import annotations

from collections.abc import Sequence


def option_name(option: str) -> str:
    """Returns the name of an option as vLLM's documentation writes it; vLLM takes underscores too."""
    return option.partition("=")[0].replace("_", "-")


def option_value(options: Sequence[str], *names: str) -> str | None:
    """Returns what was given for an option, the last time if it was given several times; `None` if it was not.

    Args:
        options: all that was given.
        names: names of the option.
    """
    found = None
    for place, option in enumerate(options):
        if option_name(option) in names:
            _, joined, value = option.partition("=")
            found = value if joined else "".join(options[place + 1 : place + 2])
    return found
