"""Memory of a sharded build and of a sharded load: what each rank allocates, compared with its share of the weights.

Four ranks (gloo, one process each) build a Llama of tensor parallelism 2 × FSDP 2, and load one in Hugging Face layout. Then
one process builds rank 0 of 16,384 of a Llama of 405 B, tensor parallelism 8 × FSDP 2,048, with a process group that exchanges
nothing: construction needs no communication.

Memory is the anonymous resident memory of the process (RssAnon of /proc/self/status), sampled every millisecond while the
model is built; what the process had before is subtracted. A tiny model is built first, so that imports do not count. The share
is the bytes of all weights divided by the number of ranks. FSDP shards rows, and rounds up where they do not divide. Most of
what the single rank takes beyond its shard is torch's: FSDP makes a device mesh per tensor-parallel parameter, and a mesh holds
a tuple of all 16,384 ranks (0.65 MB each, 1,137 parameters).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from load import Peak
from measure import Goal, Row, arguments, middle, progress, report
from torch.distributed.tensor import DTensor

from dovetail.files.spec import from_yaml
from dovetail.hf.load import load
from dovetail.hf.load_sharded import load_sharded
from dovetail.hf.write import write_fresh
from dovetail.model.construction import build, initial
from dovetail.model.model import Model
from dovetail.nn.module import tensor_at
from dovetail.parallel.construction import build_sharded, local
from dovetail.parallel.mesh import make_mesh
from dovetail.parallel.pair import Pair
from dovetail.spec.fold import declared, parameters

MEMORY = Goal(high=1.2)
EQUAL = Goal(high=0)
TINY = "width: 32\nvocab: 64\nlayers: [{repeat: 2, mixer: {heads: 8, kv_heads: 8}, ffn: {hidden: 64}}]\n"
SEED = 3


def llama(width: int, hidden: int, heads: int, kv_heads: int, layers: int, vocab: int) -> str:
    """A Llama as YAML."""
    return f"""
width: {width}
vocab: {vocab}
head: {{kind: lm, tied: false}}
layers:
  - repeat: {layers}
    mixer: {{heads: {heads}, kv_heads: {kv_heads}}}
    ffn: {{hidden: {hidden}}}
"""


FOUR = llama(2048, 5632, 32, 4, 8, 32000)  # 0.5 billion parameters
QUICK = llama(96, 264, 6, 2, 3, 512)
LLAMA_405B = llama(16384, 53248, 128, 8, 126, 128256)


def in_rank(text: str, data: int, tensor: int) -> dict[str, int]:
    """The job of one rank: memory of the build, bytes of its shard, and how many values differ from the whole model's."""
    mesh, spec = make_mesh(data=data, tensor=tensor), from_yaml(text)
    model, memory = built(spec, mesh, torch.float32)
    different = 0
    for d in declared(spec):  # one whole tensor at a time
        if d.weight.learned:
            weight = tensor_at(model, d.path)
            assert isinstance(weight, DTensor)
            different += int((weight.full_tensor() != initial(d, SEED)).sum())
    return {"memory": memory, "shard": shard_bytes(model), "different": different}


def built(spec: Model, mesh: Any, dtype: torch.dtype) -> tuple[torch.nn.Module, int]:
    """A sharded model, and the peak of anonymous memory while it was built."""
    build_sharded(from_yaml(TINY), mesh, dtype=dtype)
    with Peak() as peak:
        model = build_sharded(spec, mesh, seed=SEED, dtype=dtype)
    return model, peak.most - peak.before


def load_in_rank(directory: str, data: int, tensor: int) -> dict[str, int]:
    """The job of one rank: memory of the load, and how many values differ from those of the files."""
    mesh = make_mesh(data=data, tensor=tensor)
    build_sharded(from_yaml(TINY), mesh)
    with Peak() as peak:
        model = load_sharded(directory, mesh)
    whole, different = load(directory), 0
    for name, weight in model.named_parameters():
        assert isinstance(weight, DTensor)
        different += int((weight.full_tensor() != whole.get_parameter(name)).sum())
    return {"memory": peak.most - peak.before, "different": different}


def shard_bytes(model: torch.nn.Module) -> int:
    return sum(local(weight).nbytes for weight in model.parameters())


# -- one rank of many, alone --------------------------------------------------------------------------------------------


def alone(text: str, data: int, tensor: int) -> dict[str, int]:
    """Build rank 0 in this process, with a process group of data × tensor ranks that exchanges nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=data * tensor)
    model, memory = built(from_yaml(text), make_mesh(data=data, tensor=tensor), torch.bfloat16)
    return {"memory": memory, "shard": shard_bytes(model)}


def in_child(quick: bool) -> dict[str, int]:
    """Run `alone` in a process of its own."""
    command = [sys.executable, __file__, "--alone", *(["--quick"] if quick else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"one rank alone: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=5, help="builds by four ranks, each by processes of their own")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    text, one, data, tensor = (QUICK, QUICK, 4, 2) if flags.quick else (FOUR, LLAMA_405B, 2048, 8)
    if flags.alone:
        print(json.dumps(alone(one, data, tensor)))
        return
    torch.set_num_threads(flags.threads)
    rounds: list[list[dict[str, int]]] = []
    loads: list[list[dict[str, int]]] = []
    with progress("builds", flags.rounds + 1) as tick:
        for _ in range(flags.rounds):
            with Pair(ranks=4, timeout=1800) as four:
                rounds.append(four.run(in_rank, text, 2, 2))
            with tempfile.TemporaryDirectory(prefix="dovetail-shard-") as place, Pair(ranks=4, timeout=1800) as four:
                write_fresh(build(from_yaml(text)), Path(place) / "hf", "llama")
                loads.append(four.run(load_in_rank, str(Path(place) / "hf"), 2, 2))
            tick()
        single = in_child(flags.quick)
        tick()
    share = 4 * parameters(from_yaml(text)) / 4
    single_share = 2 * parameters(from_yaml(one)) / (data * tensor)
    ratio, spread = middle([max(rank["memory"] for rank in ranks) / share for ranks in rounds])
    different = sum(rank["different"] for ranks in rounds for rank in ranks)
    load_ratio, load_spread = middle([max(rank["memory"] for rank in ranks) / share for ranks in loads])
    load_different = sum(rank["different"] for ranks in loads for rank in ranks)
    rows = [
        Row("TP 2 × FSDP 2: share of one rank, MB", share / 1e6),
        Row("TP 2 × FSDP 2: peak memory of the build ÷ share, largest of 4 ranks", ratio, MEMORY, spread),
        Row("TP 2 × FSDP 2: values that differ from the whole model's", float(different), EQUAL),
        Row("TP 2 × FSDP 2: peak memory of the load ÷ share, largest of 4 ranks", load_ratio, MEMORY, load_spread),
        Row("TP 2 × FSDP 2: values that differ from those of the files", float(load_different), EQUAL),
        Row("405 B, rank 0 of 16,384: share, MB (bf16)", single_share / 1e6),
        Row("405 B, rank 0 of 16,384: its shard, rounded up to whole rows, MB", single["shard"] / 1e6),
        Row("405 B, rank 0 of 16,384: peak memory of the build, MB", single["memory"] / 1e6),
        Row("405 B, rank 0 of 16,384: peak memory beyond its shard, MB", (single["memory"] - single["shard"]) / 1e6),
    ]
    report(rows, flags.json)


if __name__ == "__main__":
    main()
