"""An index of many vectors: recall of faiss's inverted lists against the exact search in torch that recipes/retrieval.py uses.

    python benchmarks/index.py [--vectors 1000000] [--quick] [--json]            20,000 vectors if quick
                                                                                 needs benchmarks/peers/make faiss

The vectors are made, as embeddings are: points of length 1 around topics, which are around themes. A query is a vector of the
index with noise. recall = the fraction of the exact ten nearest that the index returns; beside it the fraction of all vectors
that it compares with. Seconds have no goal.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from measure import Goal, Row, arguments, progress, report
from peer import Process
from torch import Tensor

WIDTH, TOP, QUERIES, AT_ONCE = 64, 10, 200, 50_000
THEMES, TOPICS = 100, 40  # per theme
PROBES = (1, 4, 16, 64)
HELD, RECALL, COMPARED = 16, 0.95, 0.05  # with so many probes: the least recall, and the most vectors compared


def made(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Vectors (count, width) and queries (QUERIES, width), all of length 1."""
    draw = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return F.normalize(torch.randn(*shape, WIDTH, generator=draw), dim=-1)

    topics = F.normalize(noise(THEMES, 1) + 0.8 * noise(THEMES, TOPICS), dim=-1).flatten(0, 1)
    vectors = F.normalize(topics[torch.randint(len(topics), (count,), generator=draw)] + 0.7 * noise(count), dim=-1)
    asked = vectors[torch.randint(count, (QUERIES,), generator=draw)]
    return vectors, F.normalize(asked + 0.3 * noise(QUERIES), dim=-1)


def exact(vectors: Tensor, queries: Tensor) -> Tensor:
    """(queries, TOP) the numbers of the nearest vectors, piece by piece."""
    best = torch.zeros(len(queries), 0)
    numbers = torch.zeros(len(queries), 0, dtype=torch.long)
    for begin in range(0, len(vectors), AT_ONCE):
        scores = queries @ vectors[begin : begin + AT_ONCE].T
        index = torch.arange(begin, begin + scores.shape[1]).expand(len(queries), -1)
        best, numbers = torch.cat([best, scores], 1), torch.cat([numbers, index], 1)
        best, chosen = best.topk(TOP)
        numbers = numbers.gather(1, chosen)
    return numbers


def recall(got: list[list[int]], want: Tensor) -> float:
    """The fraction of the nearest that were returned."""
    return sum(len({*a} & {*b}) for a, b in zip(got, want.tolist(), strict=True)) / want.numel()


def main() -> int:
    """Measure and report."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--vectors", type=int, default=1_000_000, metavar="N")
    given = parser.parse_args()
    count = 20_000 if given.quick else given.vectors
    vectors, queries = made(count)
    nearest, rows = exact(vectors, queries), list[Row]()
    with tempfile.TemporaryDirectory() as directory, progress("index", len(PROBES) + 1) as tick:
        paths = [Path(directory) / f"{name}.npy" for name in ("vectors", "queries")]
        for path, x in zip(paths, (vectors, queries), strict=True):
            np.save(path, x.numpy())
        lists = max(16, round(count**0.5 / 16) * 16)
        peer = Process("faiss", "index_worker.py", *map(str, paths), f"--lists={lists}", f"--threads={torch.get_num_threads()}")
        for probes in (0, *PROBES):
            answer = peer.ask(probes=probes, top=TOP)
            found, compared = recall(answer["nearest"], nearest), answer["compared"] / count
            if probes == 0:
                rows.append(Row("faiss, all vectors: of torch's ten nearest", found, Goal(low=0.999)))
            else:
                held = probes == HELD and not given.quick  # of few vectors, so many lists are most of them
                goals = (Goal(low=RECALL), Goal(high=COMPARED)) if held else (None, None)
                rows.append(Row(f"{lists} lists, {probes} probed: recall at {TOP}", found, goals[0]))
                rows.append(Row(f"{lists} lists, {probes} probed: vectors compared ÷ all", compared, goals[1]))
            rows.append(Row(f"{probes or 'all'} probed: milliseconds per query", 1000 * answer["seconds"] / QUERIES))
            tick()
        peer.close()
    report(rows, given.json)
    return 1 if any(row.holds is False for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
