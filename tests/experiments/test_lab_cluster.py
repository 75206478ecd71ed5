"""A lab on a cluster of two nodes, one of which is killed; in an environment of its own: bash benchmarks/peers/make ray."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import fake_training
import pytest
from lab_designs import lab

from dovetail.base.errors import FileError
from dovetail.disk.yaml import dump_yaml
from dovetail.experiments.design import read_design
from dovetail.experiments.lab import run_lab

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PYTHON = ROOT / ".peers" / "ray" / "bin" / "python"
PATIENT = {"RAY_raylet_start_wait_time_s": "600"}  # Ray gives its daemons 30 s to start: too few on a busy machine
SCRIPT = """
import json, sys
from pathlib import Path
import fake_training
from ray.cluster_utils import Cluster
from dovetail.experiments import lab
from dovetail.experiments.cluster import ClusterPool
from dovetail.experiments.design import read_design

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
second = cluster.add_node(num_cpus=1)
cluster.wait_for_nodes()
pools = []


class LosesANode(ClusterPool):
    def __init__(self, *given):
        super().__init__(*given)
        pools.append(self)

    def wait(self, seconds):
        place = super().wait(seconds)
        # both nodes have worked, and both are at work
        if len(self.nodes) == 2 and len(self.pending) == 2 and len(cluster.list_all_nodes()) == 2:
            cluster.remove_node(second, allow_graceful=False)  # SIGKILL
        return place


lab.ClusterPool = LosesANode
state = lab.run_lab(read_design(sys.argv[1]), Path("out"), fake_training.train, cluster=cluster.address)
left = len(cluster.list_all_nodes())
nodes = [list(pool.nodes.values()) for pool in pools]
cluster.shutdown()
print(json.dumps({"nodes": nodes, "left": left, "verdict": state.verdict("gqa").to_dict()}))
"""


def environment() -> dict[str, str]:
    paths = os.pathsep.join([str(HERE), str(ROOT / "src")])
    return {**os.environ, "PYTHONPATH": paths, "RAY_USAGE_STATS_ENABLED": "0", "FAKE_SECONDS": "1", **PATIENT}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not (PYTHON.parents[1] / "ready").exists(), reason="bash benchmarks/peers/make ray")
def test_a_cluster_that_loses_a_node_comes_to_the_same_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plays.txt").write_text("words", encoding="utf-8")
    arms = {"gqa": {"set": {"layers.*.mixer.kv_heads": 2}}}
    data: dict[str, Any] = lab(arms=arms, seeds={"at_least": 6, "at_most": 6}, smallest=1e-6)
    (tmp_path / "lab.yaml").write_text(dump_yaml(data), encoding="utf-8")
    done = subprocess.run(
        [str(PYTHON), "-c", SCRIPT, "lab.yaml"], env=environment(), capture_output=True, text=True, timeout=800, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert len(result["nodes"][0]) == 2, "both nodes trained runs"
    assert result["left"] == 1, "the second node was killed"
    starts = Path("out/starts.txt").read_text(encoding="utf-8").split()
    assert not any(start.endswith(fake_training.COMPLETE) for start in starts), "a complete run was trained again"
    assert len({*starts}) == 12
    assert 1 <= len(starts) - 12 <= 2, "the run of the lost node, and no other, was started again"
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    here = run_lab(read_design(data), Path("here"), fake_training.train, workers=2).verdict("gqa")
    assert here is not None
    assert json.loads(json.dumps(here.to_dict())) == result["verdict"]


def test_without_ray_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "ray", None)
    (tmp_path / "plays.txt").write_text("words", encoding="utf-8")
    with pytest.raises(FileError, match=r'--cluster: a cluster is reached through ray: pip install "dovetail-lm\[cluster\]"'):
        run_lab(read_design(lab()), Path("out"), fake_training.train, cluster="auto")
