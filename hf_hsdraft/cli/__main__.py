"""`python -m hf_hsdraft.cli` is `hsdraft`, for launchers that take a module."""

from .main import main

main()
