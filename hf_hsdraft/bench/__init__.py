"""`hsdraft bench`: measures decoding systems on the same prompts, in one process."""

VARIANTS = (
    "default, untrained, chain, chain3 (depth), tree, tree8 (nodes), tree8x3 (and depth), any of them +none, "
    "+ensemble, +resample, +ngrams, +cost or +option=value; chains (of 1 to 7 tokens); lookup, static, packed, "
    "cacheback"
)
