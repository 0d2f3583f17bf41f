"""The commands of `hsdraft`. Each file has an `app` with one command or more; `main.py` takes every file."""
