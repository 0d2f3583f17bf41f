"""The tuned numbers that only the package reads; this module does not travel. See `tuning`."""

from __future__ import annotations

from dataclasses import dataclass

from .tuning import Tuning


@dataclass(frozen=True)
class PackageTuning(Tuning):
    """All tuned numbers: those of `Tuning`, and those of accelerations and of the check of a target's fit."""

    # --- Packed weights of a target, on CPUs ---
    # Number of plain forwards that packing takes as long as - measured: 3 to 7.
    packing_forwards: float = 3.0
    # Part of a plain forward that packed weights save - measured: 0.2 to 0.5.
    packing_saves: float = 0.2
    # Number of tokens that a call may still emit, for which comparing the weights pays - by hand.
    packing_least_room: int = 8
    # Number of rows that the layout is chosen for - by hand.
    packed_rows: int = 16
    # Least number of numbers of a weight: products of smaller ones take no longer than starting them - by hand.
    packed_least_numbers: int = 2**16
    # Number of bytes of all copies in the process, unless they are asked for - by hand.
    packed_bytes: int = 2**31

    # --- Products of a drafter, on CPUs ---
    # Number of rows that 8-bit weights are multiplied by - by hand: a default beam has so many.
    rows_in_8_bits: int = 8
    # The same of a large weight, a head, that has a packed copy; and the number of numbers that makes it large
    # - by hand: a head of 10 million numbers took 1.1 ms for one row by 8 bits, 2.0 for six, 0.8 packed.
    large_rows_in_8_bits: int = 2
    large_weight: int = 2**22
    # Number of rows that a packed copy is multiplied by - by hand: those of several texts.
    product_rows: int = 64
    # Number of bytes of a weight that gets a packed copy - by hand.
    product_bytes: int = 2**27
    # Number of rows of a weight that are brought to 8 bits at once - by hand.
    rows_rounded: int = 4096

    # --- Attention, on CPUs ---
    # Number of keys of a single text from which on the heads of a tree that share keys are read as one
    # - History: over 200 keys joining cost 0.8 to 1.4 ms of 9 and 13 nodes; over 800 it took 7.0 instead of 8.1 ms.
    many_keys: int = 1024

    # --- Compiled roll-outs ---
    # They hold a multiple of so many positions - by hand: few sizes to compile, masks in whole vectors.
    static_positions: int = 256
    # Number of compiled roll-outs that a drafter's weights keep - by hand.
    spare_roll_outs: int = 4

    # --- Does a drafter fit its target? ---
    # Part of the recorded right guesses that is enough - by hand: another dtype changes a few of a hundred choices.
    fit_enough: float = 0.85
    # Number of guesses that may be missing besides - by hand.
    fit_slack: int = 2
    # Number of drafts until guesses are judged, and until they are judged no more - by hand.
    fit_judged: int = 16
    fit_trusted: int = 96

    # --- Batches of a verifying server ---
    # Part of the last forward that a batch waits for texts - by hand: a quarter, for any text, brought 1.5 to 1.7 times
    # the tokens/s of 2 ms with 16 devices that came back in time, and 0.8 times where they did not.
    batch_wait: float = 0.5
    # Part of a forward's fixed time that its columns may add, which limits drafts where many texts share it; number of
    # forwards after which costs are known - by hand: with tau of 1.5 drafts gain as long as they add less.
    drafts_share: float = 0.5
    costs_known: int = 16
    # Weight of the newest time that a text was away in the mean; number of times the mean, and seconds besides, after
    # which it is late - by hand.
    newest_away: float = 0.3
    late_factor: float = 1.5
    late_slack: float = 0.002


TUNING = PackageTuning()
