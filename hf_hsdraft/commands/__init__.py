"""The commands of `hsdraft`. Each file has an `app` with one command or more; `cli.py` takes every file."""
