"""The command `hsdraft`. Its help is shown at once, without the seconds that torch and transformers take to load."""

from __future__ import annotations

import importlib.util
import sys


def main() -> None:
    """Runs the command line of `hf_hsdraft`."""
    if len(sys.argv) == 1 or {"--help", "--version"} & set(sys.argv):
        # Commands load what they need when they run. So for their help the package is found, but not run.
        spec = importlib.util.find_spec("hf_hsdraft")
        assert spec is not None
        sys.modules["hf_hsdraft"] = importlib.util.module_from_spec(spec)
    from hf_hsdraft.cli import main as run

    run()


if __name__ == "__main__":
    main()
