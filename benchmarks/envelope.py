"""The ratios of gaps to bounds on clean pairs: whether the constants in src/dovetail/proof/compare/comparison.py are large
enough.

    python benchmarks/envelope.py [--json]

Each row is the largest ratio of a gap to its bound over all taps of tiny random models of all families of seeded_bugs.py, with
and without massive channels. A constant holds where the ratio is at most 1.
"""

from __future__ import annotations

import itertools
import tempfile
import warnings
from pathlib import Path

import torch
from measure import Goal, Row, arguments, progress, report
from seeded_bugs import FAMILIES
from verify import DTYPES, CachedNative, Seeded, write_model

from dovetail.proof.compare.comparison import compare_sides
from dovetail.proof.compare.prompt import random_prompt

SEEDS = 8  # from 0: benchmarks/verify.py uses others


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.set_defaults(threads=1)  # a second thread does not help tiny models
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    warnings.filterwarnings("ignore")
    seeds, ratios = 1 if given.quick else SEEDS, dict.fromkeys(("median", "worst", "float64"), 0.0)
    with tempfile.TemporaryDirectory() as place, progress("envelope", len(FAMILIES) * seeds * 2) as tick:
        for name, seed, massive in itertools.product(FAMILIES, range(seeds), (False, True)):
            there = write_model(name, seed, Path(place), massive=massive)
            a, b = CachedNative(there), Seeded(there)
            assert a.spec is not None
            for dtype in DTYPES:
                for tap in compare_sides(a, b, random_prompt(a.spec, seed=seed), dtype=dtype).taps:
                    ratios["median"] = max(ratios["median"], tap.typical / tap.allowed_typical)
                    ratios["worst"] = max(ratios["worst"], tap.gap / tap.allowed)
                    ratios["float64"] = max(ratios["float64"], tap.exact / tap.allowed_exact)
            tick()
    report([Row(f"{name} gap, of its bound", ratio, Goal(high=1.0)) for name, ratio in ratios.items()], given.json)


if __name__ == "__main__":
    main()
