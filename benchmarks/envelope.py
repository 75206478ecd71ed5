"""The gaps of clean pairs, from which verify's envelopes are made: the numbers in src/dovetail/verification/envelope.py.

    python benchmarks/envelope.py [--json]

Each row is the largest gap of any tap, divided by one more than the layers before it, over tiny random models of all families
of seeded_bugs.py. A stored number holds where it is at least what is measured here; ROOM comes on top of it.
"""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path

import torch
from measure import Goal, Row, arguments, progress, tell
from seeded_bugs import FAMILIES
from verify import Planted, Remembered, written

from dovetail.verification.comparison import compare_sides, layers_before
from dovetail.verification.envelope import EXACT, PER_LAYER
from dovetail.verification.prompt import random_prompt

SEEDS = 8  # from 0: benchmarks/verify.py takes others


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.set_defaults(threads=1)  # tiny models: a second thread only waits
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    warnings.filterwarnings("ignore")
    dtypes, seeds = (torch.float32, torch.bfloat16, torch.float16), 1 if given.quick else SEEDS
    largest, exact = dict.fromkeys(dtypes, 0.0), 0.0
    with tempfile.TemporaryDirectory() as place, progress("envelope", len(FAMILIES) * seeds) as tick:
        for name in FAMILIES:
            for seed in range(seeds):
                there = written(name, seed, Path(place))
                a, b = Remembered(there), Planted(there)
                assert a.spec is not None
                for dtype in dtypes:
                    for tap in compare_sides(a, b, random_prompt(a.spec, seed=seed), dtype=dtype).taps:
                        depth = 1 + layers_before(tap.address, len(a.spec.layers))
                        largest[dtype], exact = max(largest[dtype], tap.gap / depth), max(exact, tap.exact / depth)
                tick()
    # a stored number is named beside the measured one: their ratio must not be above 1
    names = {dtype: f"{str(dtype).removeprefix('torch.')}, of {PER_LAYER[dtype]:g}" for dtype in dtypes}
    rows = [Row(names[dtype], largest[dtype] / PER_LAYER[dtype], Goal(high=1.0)) for dtype in dtypes]
    tell([*rows, Row(f"float64, of {EXACT:g}", exact / EXACT, Goal(high=1.0))], given.json)


if __name__ == "__main__":
    main()
