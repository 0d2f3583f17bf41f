"""The first call of a process, and the memory of concurrent calls, each in fresh processes."""
