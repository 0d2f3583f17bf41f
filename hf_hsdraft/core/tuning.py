"""The tuned numbers: how much to draft, when to pack, when to try again.

They decide how much is drafted and how long that takes. The texts do not depend on them, except that the thresholds of
`Trials of a target` also guard correctness.

Each comment says what a number is and its unit, and after a dash where the value comes from. "By hand" means chosen
while the code was written, with no measurement kept. "History" is `docs/history.md`, and "replayed" are its trials
with recorded drafts. Time is counted in plain rounds: forwards of the target on one token of each row.

Other numbers stay beside their code: formats, limits that inputs are checked against, defaults of options.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class Assumption:
    """A prior for a number before it is measured: its value, and how far off it may be."""

    value: float
    spread: float

    def at(self, value: float) -> Assumption:
        """The same spread around another value."""
        return Assumption(value, self.spread)


@dataclass(frozen=True)
class Tuning:
    """All tuned numbers, in groups. Read them where they are used: `TUNING.pace_fading`."""

    # --- Drafts of a hidden-state drafter ---
    # Number of columns of the draft vocabulary that a beam looks at below its first depth
    # - measured: 506, 494, 488, 491 target forwards for the same tokens in float32 with 512, 1,024, 2,048, 4,096
    # (trees of 24 nodes, no n-grams); a draft takes 2 of 100 ms more with 4,096 than with 512.
    likely_columns: int = 2048
    # Share of `tree_size` that the rows of a batch have together - measured; the figures were not kept.
    batch_share: Fraction = Fraction(2, 3)
    batch_least_nodes: int = 2  # least number of nodes of each row of a batch - by hand
    most_pending: int = 64  # number of tokens of rounds without a draft whose hidden states may wait unread - by hand

    # --- Drafts by n-grams ---
    ngram_depth: int = 24  # greatest depth of a draft - by hand: nothing is right for longer often enough
    # Number of leaders that a table keeps, and of followers of a leader - by hand.
    ngram_leaders: int = 2**17
    ngram_followers: int = 8
    # Probability that the latest follower is the next token, after leaders of 1, 2, ... tokens - by hand.
    ngram_right: tuple[float, ...] = (0.2, 0.45, 0.65, 0.75)
    ngram_earlier: float = 0.5  # share of what is left that each earlier follower is assumed to have - by hand
    ngram_prior: float = 8.0  # number of tokens that these assumptions count for - by hand
    # Power of the probabilities after a draft's first token
    # - replayed: estimated speed-up 2.14 instead of 2.12; 2.13 with 0.8, 0.6 and 0.5.
    ngram_beyond: float = 0.7
    ngram_least: float = 1e-3  # least probability of a path that gets a node - by hand

    # --- Drafts from past texts ---
    # Lengths of the n-grams that past texts are found by - by hand: the end of a chat's template is longer than 8 in
    # many prompts, and shorter n-grams than 3 say little that the running text does not say.
    history_lengths: tuple[int, ...] = (3, 8, 24)
    history_matches: int = 32  # number of earlier places that a draft looks at - by hand
    history_depth: int = 48  # greatest depth of a draft - by hand: texts that were decoded before repeat for long
    # Least lengths of a match, in tokens, that differ in how often the next token is right, and how often it is assumed
    # to be - by hand.
    history_bins: tuple[int, ...] = (3, 4, 6, 8, 12, 16, 24, 32, 48)
    history_right: tuple[float, ...] = (0.3, 0.4, 0.55, 0.65, 0.72, 0.78, 0.84, 0.88, 0.92)
    history_prior: float = 8.0  # number of tokens that these assumptions count for - by hand
    history_most: float = 400.0  # number of tokens that are remembered of a bin - by hand
    # Number of tokens that a history keeps, and part of them that stays when the least recently used texts leave
    # - by hand: 4 million tokens take 120 MB.
    history_tokens: int = 2**22
    history_kept: float = 0.75
    # Number of tokens of a text of a batch that the other texts are shown while they grow, and of new ones that are
    # entered at once - by hand.
    history_shown: int = 4096
    history_step: int = 8

    # --- Drafts that foresee draws ---
    # Factor of the logits of a race; 1 would take the drafter's error for as large as a Gumbel variable - by hand.
    race_sharpness: float = 0.8
    # Number of draws that n-grams look ahead
    # - by hand: in 60 greedy texts 3% of the rounds accepted 8 tokens or more.
    draws_ahead: int = 8
    # Number of times in a row that what was foreseen did not come, until a text is drafted without - by hand.
    most_misses: int = 3

    # --- Calibration: how often a drafted token is right, by how sure the drafter is of it ---
    # Lower ends of the bins of a token's log-probability, in nats - by hand.
    calibration_bins: tuple[float, ...] = (-0.05, -0.15, -0.35, -0.7, -1.1, -1.6, -2.3, -3.0, -4.0, -5.0, -6.5, -8.0)
    # Number of tokens of a bin that the drafter's own word counts for
    # - replayed: estimated speed-up 2.13 instead of 2.10 with 4, sampling 1.41 instead of 1.40.
    calibration_prior: float = 64.0
    calibration_prior_right: float = 1.5  # number of right tokens that its word counts for over all bins - by hand
    calibration_most: float = 200.0  # number of tokens that are remembered of a bin, and of all of them - by hand
    # Number of tokens that a bin of an earlier text counts for in the next one - by hand.
    calibration_kept: float = 24.0

    # --- Pace: how much to draft ---
    pace_fading: float = 0.85  # weight of what earlier rounds gained, with each further round - by hand
    # Number of tokens that the first depth of a draft is assumed to gain, and what a further depth gains of that - by
    # hand.
    first_gain: float = 0.5
    gain_ratio: float = 0.4
    # The same ratio where a later depth has not been drafted, and its greatest value where it follows from earlier
    # depths - by hand.
    unknown_gain_ratio: float = 0.5
    most_gain_ratio: float = 0.95
    # Number of tokens of a round and its time in plain rounds, assumed at first - by hand.
    first_tokens: float = 2.0
    first_time: float = 1.4
    # Number of accepted tokens that expectations count for, and the most that an expected token may be worth - by hand.
    trust_prior: float = 0.3
    most_trust: float = 1.5
    # Probability that n-grams hold the next token, above which a round without a draft is no pause - by hand.
    certain: float = 0.5
    # Number of rounds without a draft until it is tried again: at first, and at most - by hand.
    first_pause: int = 8
    longest_pause: int = 32
    # Account of what drafting saves: what it begins with, in plain rounds, and the part of a round that each round
    # pays in, which drafting may lose in the long run - simulated: a drafter that is always wrong loses 0.028 of ten
    # calls of 8 tokens; with 3.0 and 0.02 it lost 0.053, and one that is mostly right gained 0.02 more.
    first_saved: float = 0.8
    allowed_loss: float = 0.01
    # The most that it holds, of a text and of a batch, where a draft costs more and saves less - by hand.
    most_saved: float = 6.0
    batch_most_saved: float = 2.0
    # What a draft has to promise beyond its cost for each plain round of debt, as a multiple of the cost - by hand.
    worth_of_debt: float = 2.0
    # What an earlier text counts for: number of drafts of its gains, and part of what was accepted - by hand.
    kept_drafts: int = 2
    kept_trust: float = 0.3

    # --- Costs of rounds, in plain rounds ---
    # What is assumed of a tree, of each node, of a draft and of each depth, with its spread
    # - runs on x86 CPUs: a tree costs 0 to 0.1 beside its nodes, a node 0.005 to 0.4, a draft of depth 6 0.2 to 0.5.
    tree_cost: Assumption = Assumption(0.03, 0.1)
    node_cost: Assumption = Assumption(0.01, 0.05)
    # What a further row adds to a forward over one row; a node of a batch is a further row of each text
    # - measured on 2 cores with AMX, SmolLM2-135M in bfloat16: 0.02 to 0.03.
    row_cost: float = 0.02
    draft_cost: Assumption = Assumption(0.1, 0.1)
    depth_cost: Assumption = Assumption(0.05, 0.05)
    cost_noise: float = 0.15  # standard deviation of one measured time - by hand
    # Weight of earlier rounds, with each further one - by hand: some 20 rounds count. History: 24 rounds gave the cost
    # of 3 nodes to a twentieth of a plain round, 15 did not.
    cost_fading: float = 0.95
    # A later time counts as so many times what was expected and so many plain rounds - by hand.
    late_factor: float = 3.0
    late_rounds: float = 0.5
    first_plain: int = 2  # number of plain rounds before anything is drafted - by hand
    # Number of plain rounds that are asked for whatever drafting gains, and of rounds between two of them - by hand.
    most_plain: int = 8
    between_plain: int = 8
    plain_aged: int = 24  # number of rounds after which the time of a plain round may have changed - by hand
    # Tokens in the time of a plain round, below which that time has to be known well - by hand.
    hardly_faster: float = 1.15
    # Weight of the newest plain round in their running mean, and how many times that mean it may count - by hand.
    plain_weight: float = 0.2
    latest_plain: float = 2.0
    # Number of nodes of the first tree, and how many times as many as before later ones may have - by hand.
    first_nodes: int = 4
    node_growth: int = 2
    # Number of tokens of the first class of lengths with separate costs; each later class is twice as long
    # - by hand.
    cost_length: int = 1024

    # --- Processors ---
    # Part of the processor time that threads wanted, below which a call that wanted so many seconds warns - by hand:
    # one other busy process on 2 cores leaves two threads 0.67, and idle compilers leave them more than 0.95.
    least_share: float = 0.85
    noticed_seconds: float = 1.0

    # --- Memory ---
    # Room of a cache that grows: so many tokens more, and the length over this number - by hand.
    spare_tokens: int = 128
    spare_part: int = 4
    layers_together: int = 8  # number of layers whose keys grow together - by hand
    # Number of rows of a masked prompt that a trunk reads at once, and number of entries of a mask from which on it is
    # made in blocks, also on GPUs, where launching kernels for each block takes longer - by hand.
    mask_rows: int = 256
    large_mask: int = 2**20
    large_mask_gpu: int = 2**25
    most_known: int = 2**14  # number of last tokens of a prompt that sessions get: entering them takes time - by hand

    # --- Trials of a target ---
    # Greatest distance of logits that are the same, relative to their spread: in float32, and with reduced precision of
    # its products - by hand.
    same_float32: float = 1e-4
    same_reduced: float = 1e-2
    same_half: float = 0.25  # in half precision at most, and where the model's own noise cannot be measured - by hand
    # Where it can: a multiple of that noise, and number of times the least step of the dtype that it is at least;
    # products by quantised blocks are the same for any number of rows, which hides the noise of the rest
    # - measured in bfloat16, SmolLM2-135M, 26 prompts: trees and chains come to 0.09, 4.7 times the noise, at most; a
    # target deaf to masks to 0.38 to 1.5.
    of_noise: float = 6.0
    least_eps: float = 4.0
    least_eps_of_blocks: float = 16.0
    # Number of tokens that calls may emit for which a trial pays, also where weights are packed and layers compiled;
    # and numbers of a target whose trial takes no time
    # - measured: a trial takes as long as 15 to 22 plain rounds (SmolLM2-135M, bfloat16), and drafting saves a quarter
    # to half of a round a token, packed 0.4, compiled two thirds.
    trial_room: int = 48
    trial_room_packed: int = 40
    trial_room_compiled: int = 24
    trial_numbers: int = 2**24
    # Number of tokens up to which a text is tried only once, unless the configuration names a length - by hand.
    sure_length: int = 256
    # Number of tokens that recurrent layers read again with the next drafts, before they get a forward - by hand.
    most_unread: int = 12
    # Number of tokens of padding in a forward at the end of a call whose cache outlives it - by hand.
    padding_columns: int = 32

    # --- Batches ---
    # Part of the rows that still grow, at which the ended ones leave the cache; leaving moves it - by hand. History:
    # leaving at all brought 1.24 instead of 1.20.
    leaving_share: float = 0.75
    abreast: int = 1  # number of tokens that a row may be ahead of the last one and is still waited for - by hand

    # --- Packed weights of a target, on CPUs ---
    packing_forwards: float = 3.0  # number of plain forwards that packing takes as long as - measured: 3 to 7
    # Part of a plain forward that packed weights save, in bfloat16, in float32, and by a GGUF file's blocks
    # - measured on an AMD EPYC, SmolLM2-135M: 0.2, 0.1 and 0.7.
    packing_saves: float = 0.2
    packing_saves_float32: float = 0.1
    packing_saves_blocks: float = 0.5
    # How many times as much has to be lost before a call packs that is too short to win it back - by hand.
    packing_patience: float = 5.0
    # Number of tokens that a call may still emit, for which comparing the weights pays - by hand.
    packing_least_room: int = 8
    packed_rows: int = 16  # number of rows that the layout is chosen for - by hand
    # Number of products by copies of one size, and as many by weights, that are timed before the quicker way is taken
    # - by hand: two forwards of 30 layers.
    raced_products: int = 30
    # Least number of numbers of a weight: products of smaller ones take no longer than starting them - by hand.
    packed_least_numbers: int = 2**16
    # Number of rows up to which quantised weights are multiplied as such; more take unpacked weights
    # - measured by small_products.py --rows 64,96,128, AMD EPYC without AMX: Q4_1 took 54, 81 and 108 ms, bfloat16
    # weights 62, 87 and 104; in float32, 96 rows took 0.74 of the time. Packed copies are quicker, and take memory.
    small_rows: int = 96
    packed_bytes: int = 2**31  # number of bytes of all copies in the process, unless they are asked for - by hand

    # --- Compiled layers of a target, on CPUs ---
    # Number of forwards in a process after which its layers are compiled - by hand: the compiler takes one core about a
    # minute, and a forward gets quicker by a third.
    compiling_forwards: int = 100
    compiling_looks: int = 8  # number of forwards between two looks for a program - by hand: a look takes 0.3 ms
    # Least number of numbers of a layer's largest weight; forwards of smaller ones take little time anyway - by hand.
    compiled_least_numbers: int = 2**16
    # Seconds after which a compiler is taken for stuck, and bytes of its data beyond which it ends - by hand: at idle
    # priority it may take many times the minute that it takes alone.
    compiling_seconds: float = 3600.0
    compiling_bytes: int = 2**32
    # Number of kinds of layers beyond which a target is not compiled - by hand: each takes a compiler's time.
    most_kinds_of_layers: int = 4
    # By how many times the precision of their dtype two ways to sum may differ, relative to their size - by hand.
    rounded_sums: float = 16.0

    # --- Products of a drafter, on CPUs ---
    rows_in_8_bits: int = 8  # number of rows that 8-bit weights are multiplied by - by hand: a default beam has so many
    # The same of a large weight, a head, that has a packed copy; and the number of numbers that makes it large
    # - by hand: a head of 10 million numbers took 1.1 ms for one row by 8 bits, 2.0 for six, 0.8 packed.
    large_rows_in_8_bits: int = 2
    large_weight: int = 2**22
    product_rows: int = 64  # number of rows that a packed copy is multiplied by - by hand: the rows of several texts
    product_bytes: int = 2**27  # number of bytes of a weight that gets a packed copy - by hand
    rows_rounded: int = 4096  # number of rows of a weight that are brought to 8 bits at once - by hand

    # --- Attention, on CPUs ---
    # Number of keys of a single text from which on the heads of a tree that share keys are read as one
    # - History: over 200 keys joining cost 0.8 to 1.4 ms of 9 and 13 nodes; over 800 it took 7.0 instead of 8.1 ms.
    many_keys: int = 1024
    # Number of queries of a text and a key head that our operator takes; the same in bfloat16 beside AMX
    # - by hand; measured: 27 queries over 200 keys took 41 instead of 63 microseconds with AMX, 51 over 1,000 keys 385
    # instead of 307.
    few_queries: int = 192
    few_queries_beside_tiles: int = 32

    # --- Compiled roll-outs ---
    # They hold a multiple of so many positions - by hand: few sizes to compile, masks in whole vectors.
    static_positions: int = 256
    spare_roll_outs: int = 4  # number of compiled roll-outs that a drafter's weights keep - by hand

    # --- Does a drafter fit its target? ---
    # Part of the recorded right guesses that is enough - by hand: another dtype changes a few of a hundred choices.
    fit_enough: float = 0.85
    fit_slack: int = 2  # number of guesses that may be missing besides - by hand
    # Number of drafts until guesses are judged, and until they are judged no more - by hand.
    fit_judged: int = 16
    fit_trusted: int = 96


TUNING = Tuning()
