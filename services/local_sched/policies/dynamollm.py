"""DynamoLLM (arXiv:2408.00741): requests in classes by input and output length, each with a clock of its own.

The clock of a class is the one of least energy in time for its longest requests, found in the profile; it is
one for both phases. Where classes meet on a GPU, the most demanding pins its clock (the paper, Appendix I).

Simplified: a model has too few GPUs here for a pool per class, so classes share them; nor is a model split
over more GPUs, or its instances counted, by class. The load of an engine, which DynamoLLM profiles as well,
is the number of its requests.
"""

from bisect import bisect_left

from services.local_sched.grid import coarse
from services.local_sched.policies.affinity import best_clock_mhz
from services.local_sched.policies.sight import Sight, at_least, divided

INPUTS = (256, 1024, 8192)  # upper ends of the classes S, M and L (the paper, Table 2)
OUTPUTS = (100, 350, 1000)


def dynamollm(sight: Sight, shares_pct: tuple[int, ...]) -> int:
    """Return the place of the highest clock of the classes on the GPU."""
    places, _ = divided(sight, shares_pct)
    found = []
    for load, lengths, place in zip(sight.loads, sight.lengths, places, strict=True):
        share_pct, batch = sight.device.sm_sizes_pct[place], coarse(len(lengths), 2)
        for inputs, outputs in {class_of(*each) for each in lengths}:
            found.append(best_clock_mhz(load.lut, share_pct, inputs, outputs, batch))
    return at_least(sight, max(found))


def class_of(input_tokens: int, output_tokens: int) -> tuple[int, int]:
    """Return the class of a request, by the longest lengths in it."""
    return _upper(INPUTS, input_tokens), _upper(OUTPUTS, output_tokens)


def _upper(ends: tuple[int, ...], tokens: int) -> int:
    return ends[min(bisect_left(ends, tokens), len(ends) - 1)]
