"""An index of faiss, in its own environment (benchmarks/peers/make), as a process that takes requests.

    python index_worker.py VECTORS.npy QUERIES.npy --lists 1024 --threads 2

One line of JSON goes out when the vectors are clustered into lists and stored; then, for each line on stdin:

    {"probes": 16, "top": 10}     {"nearest": [[…]], "compared": …, "seconds": …}    compared: vectors per query; 0 probes: all
"""

from __future__ import annotations

import argparse
import json
import sys
import time

import faiss  # type: ignore[import-not-found]  its environment has it
import numpy as np

SAMPLE = 64  # vectors per list that the clustering reads


def main() -> None:
    """Answer requests until stdin ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("vectors")
    parser.add_argument("queries")
    parser.add_argument("--lists", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    faiss.omp_set_num_threads(given.threads)
    vectors, queries = np.load(given.vectors), np.load(given.queries)
    flat = faiss.IndexFlatIP(vectors.shape[1])
    index = faiss.IndexIVFFlat(flat, vectors.shape[1], given.lists, faiss.METRIC_INNER_PRODUCT)
    index.cp.seed, index.cp.max_points_per_centroid = 1, SAMPLE
    index.train(vectors)
    index.add(vectors)
    whole = faiss.IndexFlatIP(vectors.shape[1])
    whole.add(vectors)
    print(json.dumps({"version": faiss.__version__, "settings": {"index": "IVFFlat", "lists": given.lists}}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        index.nprobe = max(1, asked["probes"])
        stats = faiss.cvar.indexIVF_stats
        stats.reset()
        begin = time.perf_counter()
        _, nearest = (index if asked["probes"] else whole).search(queries, asked["top"])
        seconds = time.perf_counter() - begin
        compared = stats.ndis / len(queries) if asked["probes"] else len(vectors)
        print(json.dumps({"nearest": nearest.tolist(), "compared": compared, "seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
