"""Who proposes: the protocol, then one file or folder for each family."""
