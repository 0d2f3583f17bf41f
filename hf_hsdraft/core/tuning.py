"""Tuned numbers that several rooms read. A number that one file reads is in that file, the pace's in `pace/tuning.py`.

They decide how much is drafted and how long that takes. The texts do not depend on them, except that the thresholds in
`runtime/misreading.py` also guard correctness.

Each comment, there too, says what a number is and its unit, and after a dash where the value comes from. "By hand"
means chosen while the code was written, with no measurement kept. "History" is `docs/history.md`, and "replayed" are
its trials with recorded drafts. Time is counted in plain rounds: forwards of the target on one token of each row.
"""

# Number of columns of the draft vocabulary that a beam looks at below its first depth
# - measured: 506, 494, 488, 491 target forwards for the same tokens in float32 with 512, 1,024, 2,048, 4,096
# (trees of 24 nodes, no n-grams); a draft takes 2 of 100 ms more with 4,096 than with 512.
LIKELY_COLUMNS = 2048
MOST_PENDING = 64  # number of tokens of rounds without a draft whose hidden states may wait unread - by hand
NGRAM_DEPTH = 24  # greatest depth of a draft - by hand: nothing is right for longer often enough
# Room of a cache that grows: so many tokens more, and the length over this number - by hand.
SPARE_TOKENS = 128
SPARE_PART = 4
MASK_ROWS = 256  # number of rows of a masked prompt that a trunk reads at once - by hand
MOST_KNOWN = 2**14  # number of last tokens of a prompt that sessions get: entering them takes time - by hand
