"""The same build on a real cluster of two nodes, in an environment of its own: bash benchmarks/peers/make ray."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dovetail.api.build_data import build_data
from dovetail.base.errors import FileError

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".peers" / "ray" / "bin" / "python"
SCRIPT = """
import json, sys, time
from ray.cluster_utils import Cluster
from dovetail.api.build_data import build_data
from dovetail.base.errors import FileError
from dovetail.data import plan
from dovetail.data.executors import RayCluster

plan.UNIT_BYTES = (4000, 10**9)
rows, out = sys.argv[1:]
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
second = cluster.add_node(num_cpus=1)
cluster.wait_for_nodes()

both = RayCluster(cluster.address)
build_data(rows, out + "/both", deduplicate=True, held_out=0.1, executor=both, quiet=True)


class LosesANode(RayCluster):
    def run(self, work, numbers):
        for i, number in enumerate(super().run(work, numbers)):
            if i == 2 and len(cluster.list_all_nodes()) == 2:
                cluster.remove_node(second, allow_graceful=False)
            yield number


build_data(rows, out + "/one", deduplicate=True, held_out=0.1, executor=LosesANode(cluster.address), quiet=True)
try:
    build_data(rows, out + "/other", field="body", cluster=cluster.address, quiet=True)
except FileError as error:
    message = str(error)
cluster.shutdown()
print(json.dumps({"nodes": list(both.nodes.values()), "message": message}))
"""


def content(directory: Path) -> dict[str, str]:
    files = [path for path in sorted(directory.iterdir()) if path.name != ".lock"]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not (PYTHON.parents[1] / "ready").exists(), reason="bash benchmarks/peers/make ray")
def test_a_cluster_builds_what_one_process_builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f"{json.dumps({'text': f'row {i % 900} ' * (i % 13)})}\n" for i in range(1500)))
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}
    done = subprocess.run(
        [str(PYTHON), "-c", SCRIPT, str(rows), str(tmp_path)], env=env, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert len(result["nodes"]) == 2, "both nodes worked"
    assert "rows.jsonl:1: has no field 'body'" in result["message"]
    monkeypatch.setattr("dovetail.data.plan.UNIT_BYTES", (4000, 10**9))
    build_data(rows, tmp_path / "here", deduplicate=True, held_out=0.1, workers=1, quiet=True)
    assert content(tmp_path / "both") == content(tmp_path / "one") == content(tmp_path / "here")


def test_without_ray_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(FileError, match=r'--cluster: a cluster is reached through ray: pip install "dovetail-lm\[cluster\]"'):
        build_data(tmp_path / "a.txt", tmp_path / "out", cluster="auto", quiet=True)
