"""Methods beside the core: see README.md in this folder. Nothing imports them, `core/methods.py` loads them by name."""
