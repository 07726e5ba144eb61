"""Python's cycle collector, told what kind of process this is.

hivemind brings torch, and with it several hundred thousand objects that live as long as the process. By default every
700 allocations start a collection, and the older generations walk all of them again and again: half of the processor
time of a push (benchmarks/intake.py: 4,000 completions a second of processor time before, 7,800 after).
"""

import gc

THRESHOLDS = (50_000, 50, 100)
"""Container objects that may pile up before a collection, and collections of one generation before one of the next."""


def calm_collector() -> None:
    """Exempt what has been imported from collection, and collect more rarely. Call when everything is imported."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
