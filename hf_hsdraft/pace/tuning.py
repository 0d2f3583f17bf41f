"""Tuned numbers of the pace; see `core.tuning` for what their comments say."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Assumption:
    """A prior for a number before it is measured: its value, and how far off it may be."""

    value: float
    spread: float

    def at(self, value: float) -> Assumption:
        """The same spread around another value."""
        return Assumption(value, self.spread)


# Lower ends of the bins of a token's log-probability, in nats - by hand.
CALIBRATION_BINS = (-0.05, -0.15, -0.35, -0.7, -1.1, -1.6, -2.3, -3.0, -4.0, -5.0, -6.5, -8.0)
# Number of tokens of a bin that the drafter's own word counts for
# - replayed: estimated speed-up 2.13 instead of 2.10 with 4, sampling 1.41 instead of 1.40.
CALIBRATION_PRIOR = 64.0
CALIBRATION_PRIOR_RIGHT = 1.5  # number of right tokens that its word counts for over all bins - by hand
CALIBRATION_MOST = 200.0  # number of tokens that are remembered of a bin, and of all of them - by hand
# Number of tokens that a bin of an earlier text counts for in the next one - by hand.
CALIBRATION_KEPT = 24.0
PACE_FADING = 0.85  # weight of what earlier rounds gained, with each further round - by hand
# Number of tokens that the first depth of a draft is assumed to gain, and what a further depth gains of that - by
# hand.
FIRST_GAIN = 0.5
GAIN_RATIO = 0.4
# The same ratio where a later depth has not been drafted, and its greatest value where it follows from earlier
# depths - by hand.
UNKNOWN_GAIN_RATIO = 0.5
MOST_GAIN_RATIO = 0.95
# Number of tokens of a round and its time in plain rounds, assumed at first - by hand.
FIRST_TOKENS = 2.0
FIRST_TIME = 1.4
# Number of accepted tokens that expectations count for, and the most that an expected token may be worth - by hand.
TRUST_PRIOR = 0.3
MOST_TRUST = 1.5
# Probability that n-grams hold the next token, above which a round without a draft is no pause - by hand.
CERTAIN = 0.5
# Number of rounds without a draft until it is tried again: at first, and at most - by hand.
FIRST_PAUSE = 8
LONGEST_PAUSE = 32
# Account of what drafting saves: what it begins with, in plain rounds, and the part of a round that each round
# pays in, which drafting may lose in the long run - simulated: a drafter that is always wrong loses 0.028 of ten
# calls of 8 tokens; with 3.0 and 0.02 it lost 0.053, and one that is mostly right gained 0.02 more.
FIRST_SAVED = 0.8
ALLOWED_LOSS = 0.01
# The most that it holds, of a text and of a batch, where a draft costs more and saves less - by hand.
MOST_SAVED = 6.0
BATCH_MOST_SAVED = 2.0
# What a draft has to promise beyond its cost for each plain round of debt, as a multiple of the cost - by hand.
WORTH_OF_DEBT = 2.0
# What an earlier text counts for: number of drafts of its gains, and part of what was accepted - by hand.
KEPT_DRAFTS = 2
KEPT_TRUST = 0.3
# What is assumed of a tree, of each node, of a draft and of each depth, with its spread
# - runs on x86 CPUs: a tree costs 0 to 0.1 beside its nodes, a node 0.005 to 0.4, a draft of depth 6 0.2 to 0.5.
TREE_COST = Assumption(0.03, 0.1)
NODE_COST = Assumption(0.01, 0.05)
# What a further row adds to a forward over one row; a node of a batch is a further row of each text
# - measured on 2 cores with AMX, SmolLM2-135M in bfloat16: 0.02 to 0.03.
ROW_COST = 0.02
DRAFT_COST = Assumption(0.1, 0.1)
DEPTH_COST = Assumption(0.05, 0.05)
COST_NOISE = 0.15  # standard deviation of one measured time - by hand
# Weight of earlier rounds, with each further one - by hand: some 20 rounds count. History: 24 rounds gave the cost
# of 3 nodes to a twentieth of a plain round, 15 did not.
COST_FADING = 0.95
# A later time counts as so many times what was expected and so many plain rounds - by hand.
LATE_FACTOR = 3.0
LATE_ROUNDS = 0.5
FIRST_PLAIN = 2  # number of plain rounds before anything is drafted - by hand
# Number of plain rounds that are asked for whatever drafting gains, and of rounds between two of them - by hand.
MOST_PLAIN = 8
BETWEEN_PLAIN = 8
PLAIN_AGED = 24  # number of rounds after which the time of a plain round may have changed - by hand
# Tokens in the time of a plain round, below which that time has to be known well - by hand.
HARDLY_FASTER = 1.15
# Weight of the newest plain round in their running mean, and how many times that mean it may count - by hand.
PLAIN_WEIGHT = 0.2
LATEST_PLAIN = 2.0
# Number of nodes of the first tree, and how many times as many as before later ones may have - by hand.
FIRST_NODES = 4
NODE_GROWTH = 2
