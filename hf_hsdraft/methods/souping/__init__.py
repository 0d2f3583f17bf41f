"""New weights from old ones without training: averages of drafters, and small language models of some layers."""
