"""The families of drafters that `hsdraft train` can train, one file each."""
