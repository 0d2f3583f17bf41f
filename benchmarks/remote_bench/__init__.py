"""Parts of `remote_sessions.py`."""
