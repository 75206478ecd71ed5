"""The batch script for Slurm: its options are known ones, and it trains on two nodes where srun starts them on this host."""

from __future__ import annotations

import json
import os
import re
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

DEPLOY = Path(__file__).parents[2] / "deploy"
SCRIPTS = sorted(DEPLOY.rglob("*.sh")) + sorted(DEPLOY.rglob("*.sbatch"))
OPTIONS = set((Path(__file__).parent / "sbatch_options.txt").read_text().split())  # the long ones, of sbatch 25.05
SRUN = """#!/usr/bin/env bash
# srun on one host: each task of the job is a node
[[ $1 == --kill-on-bad-exit=0 ]] && shift
code=0
for node in $(seq "$SLURM_JOB_NUM_NODES"); do "$@" > "node-$node.out" 2>&1 & tasks+=($!); done
for task in "${tasks[@]}"; do wait "$task" || code=$?; done
exit $code
"""
SCONTROL = '#!/usr/bin/env bash\n[[ "$1 $2" == "show hostnames" ]] && printf "127.0.0.1\\n127.0.0.1\\n"\n'
SPEC = "width: 28\nvocab: 270\nlayers:\n- mixer: {heads: 2, head: 14}\n  ffn: {hidden: 44}\n"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_scripts_are_bash(script: Path) -> None:
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0


def test_every_option_is_one_of_sbatch() -> None:
    lines = (DEPLOY / "slurm/train.sbatch").read_text().splitlines()
    given = [match[1] for line in lines if (match := re.fullmatch(r"#SBATCH --([a-z-]+)(=\S+)?", line))]
    assert len(given) == sum(line.startswith("#SBATCH") for line in lines) > 5
    assert set(given) <= OPTIONS
    last = max(i for i, line in enumerate(lines) if line.startswith("#SBATCH"))
    assert all(line.startswith("#") for line in lines[:last]), "sbatch reads no option after the first command"


@pytest.mark.slow
def test_the_script_trains_on_two_nodes(tmp_path: Path) -> None:
    for name, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(stat.S_IRWXU)
    (tmp_path / "tale.txt").write_text("It was the best of times, it was the worst of times.\n" * 60)
    (tmp_path / "spec.yaml").write_text(SPEC)
    (tmp_path / "run.yaml").write_text(
        "spec: spec.yaml\ntext: tale.txt\nsteps: 4\nbatch: 4\nlength: 16\nsample: 0\ntimeout: 120\n"
    )
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = str(listening.getsockname()[1])
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "x", "SLURM_JOB_NUM_NODES": "2", "SLURM_CPUS_PER_TASK": "1"}
    here = {"PATH": f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}", "PORT": port, "ADDRESS": "127.0.0.1"}
    env = {**os.environ, **slurm, **here, "DEPLOY": str(DEPLOY), "GLOO_SOCKET_IFNAME": "lo"}
    command = ["bash", str(DEPLOY / "slurm/train.sbatch"), "run.yaml", "-o", "out"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=280, check=False)
    printed = [file.read_text() for file in sorted(tmp_path.glob("node-*.out"))]
    assert done.returncode == 0, done.stderr + "\n".join(text[-2000:] for text in printed)
    assert len(printed) == 2
    assert all("matmul on cpu" in text for text in printed), "each node is tested first"
    assert len((tmp_path / "out/loss.jsonl").read_text().splitlines()) == 4
    (checkpoint,) = (tmp_path / "out/checkpoints").iterdir()
    assert len(json.loads((checkpoint / "manifest.json").read_text())["files"]) == 2, "one file per rank"


def test_a_node_that_fails_does_not_join(tmp_path: Path) -> None:
    env = {**os.environ, "HEAD": "127.0.0.1:1", "NODES": "1:2", "DIRECTORY": str(tmp_path / "missing")}
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    done = subprocess.run(
        ["bash", str(DEPLOY / "node.sh"), "run.yaml"], env=env, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 1
    assert "keep this node out of the job" in done.stdout
    assert "torch.distributed" not in done.stderr
