"""Loading a checkpoint of 2 GB: memory and time, compared with reading the bare file and with transformers.

A random Llama is written once in Hugging Face layout; the file is in the page cache when it is read. Each load runs in a
process of its own, after its imports. Anonymous memory is the memory that the process allocates: pages mapped from the file do
not count, and the pages before the load are subtracted.

    bare    readinto of every file into fresh memory, in pieces of 64 MB

Both loaders map the files, so that a load alone reads almost nothing: the time includes one read of every page of every
weight, as in the first forward pass.
"""

from __future__ import annotations

import argparse
import dataclasses as dc
import gc
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measure import Goal, Row, agree, arguments, middle, progress, report

from dovetail.files.model_dir import spec_and, write_directory
from dovetail.files.spec import from_yaml
from dovetail.hf.load import load
from dovetail.hf.write import CONFIG_FILE, exported, model_pieces
from dovetail.model.construction import build
from dovetail.model.model import Model

MEMORY = Goal(high=1.15)
TIME = Goal(high=1.5)
PIECE = 64 * 2**20


@dc.dataclass(frozen=True)
class Shape:
    width: int = 2048
    hidden: int = 5632
    heads: int = 32
    kv_heads: int = 4
    layers: int = 20
    vocab: int = 32000

    def spec(self) -> Model:
        """The spec: 1.0 billion parameters of two bytes are 2 GB."""
        return from_yaml(f"""
width: {self.width}
vocab: {self.vocab}
head: {{kind: lm, tied: false}}
norm: {{kind: rmsnorm, eps: 1.0e-6}}
layers:
  - repeat: {self.layers}
    norm: {{kind: rmsnorm, eps: 1.0e-6}}
    mixer: {{heads: {self.heads}, kv_heads: {self.kv_heads}}}
    ffn: {{hidden: {self.hidden}}}
""")


QUICK = Shape(width=96, hidden=264, heads=6, kv_heads=2, layers=3, vocab=512)


def write(place: Path, shape: Shape) -> int:
    """Write a checkpoint in Hugging Face layout, in bfloat16 and in files of 1 GB; return the bytes of its weights."""
    model = build(shape.spec(), dtype=torch.bfloat16)
    ported, pieces = exported(model.part, model_pieces(model), "llama", {})
    write_directory(place, pieces, {**spec_and(model.part, {}), CONFIG_FILE: json.dumps(ported.config).encode()}, shard=10**9)
    (place / "dovetail.yaml").unlink()  # as a checkpoint of another library
    return sum(weight.nbytes for weight in model.parameters())


# -- the child: one load, measured ------------------------------------------------------------------------------------


def anonymous() -> int:
    """The anonymous memory of this process, in bytes."""
    with open("/proc/self/status") as lines:
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


class Peak:
    """The peak of anonymous memory inside the context, sampled every millisecond."""

    def __enter__(self) -> Peak:
        gc.collect()
        self.before = self.most = anonymous()
        self.over = False
        self.watch = threading.Thread(target=self._sample)
        self.watch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over = True
        self.watch.join()
        self.most = max(self.most, anonymous())

    def _sample(self) -> None:
        while not self.over:
            self.most = max(self.most, anonymous())
            time.sleep(0.001)


def bare(place: Path) -> Any:
    buffers = []
    for path in sorted(place.glob("*.safetensors")):
        buffer = torch.empty(path.stat().st_size, dtype=torch.uint8)
        buffers.append(buffer)
        view = memoryview(buffer.numpy())
        with path.open("rb", buffering=0) as file:
            done = 0
            while count := file.readinto(view[done : done + PIECE]):
                done += count
    return buffers


def theirs(place: Path) -> Any:
    import transformers

    return transformers.LlamaForCausalLM.from_pretrained(place)


def touched(model: torch.nn.Module) -> Any:
    """Read one byte of every page of the weights, and return the model."""
    assert sum(int(weight.detach().reshape(-1).view(torch.uint8)[::4096].sum()) for weight in model.parameters()) > 0
    return model


WAYS: dict[str, Callable[[Path], Any]] = {
    "ours": lambda place: touched(load(place)),
    "bare": bare,
    "transformers": lambda place: touched(theirs(place)),
}


def child(way: str, place: Path, threads: int, watched: bool) -> None:
    """Print the seconds of one load, or its anonymous memory: memory is sampled in a run that is not timed."""
    torch.set_num_threads(threads)
    if way == "transformers":
        import transformers
        from transformers.models.llama import modeling_llama

        transformers.utils.logging.disable_progress_bar()
        assert modeling_llama
    if watched:
        with Peak() as peak:
            model = WAYS[way](place)
        print(json.dumps({"memory": peak.most - peak.before}))
    else:
        begin = time.perf_counter()
        model = WAYS[way](place)
        print(json.dumps({"seconds": time.perf_counter() - begin}))
    assert model  # alive until here


def in_child(way: str, place: Path, threads: int, *, watched: bool = False) -> float:
    """Run `child` in a process of its own, and return its figure."""
    flags = ["--child", way, "--place", str(place), "--threads", str(threads), *(["--watched"] if watched else [])]
    done = subprocess.run([sys.executable, __file__, *flags], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{way}: {done.stderr[-2000:]}")
    figures = json.loads(done.stdout.splitlines()[-1])
    return figures["memory"] if watched else figures["seconds"]


def same_weights(place: Path) -> None:
    """Check that both loaders give the same weights."""
    ours, reference = load(place), theirs(place)
    pairs = {"embed.table": "model.embed_tokens.weight", "layers.1.ffn.down.weight": "model.layers.1.mlp.down_proj.weight"}
    for mine, other in pairs.items():
        agree(mine, ours.get_parameter(mine).double(), reference.get_parameter(other).double(), 0.0)


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=7, help="paired rounds of each time")
    parser.add_argument("--child", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--place", type=Path, help="the directory of the checkpoint; by default a temporary one")
    parser.add_argument("--watched", action="store_true", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.child:
        child(flags.child, flags.place, flags.threads, flags.watched)
        return
    torch.set_num_threads(flags.threads)
    with tempfile.TemporaryDirectory(dir=flags.place) as root:
        place = Path(root) / "model"
        size = write(place, QUICK if flags.quick else Shape())
        same_weights(place)
        report(measured(place, size, flags), flags.json)


def measured(place: Path, size: int, flags: argparse.Namespace) -> list[Row]:
    memory = {way: in_child(way, place, flags.threads, watched=True) / size for way in ("ours", "transformers")}
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    with progress("loads", (flags.rounds + 1) * len(WAYS)) as tick:
        for i in range(flags.rounds + 1):
            for way in list(WAYS) if i % 2 else reversed(WAYS):
                times[way].append(in_child(way, place, flags.threads))
                tick()
    ratios = {way: middle([a / b for a, b in zip(times["ours"][1:], times[way][1:], strict=True)]) for way in WAYS}
    return [
        Row("checkpoint, GB", size / 1e9),
        Row("anonymous memory of a load ÷ weights", memory["ours"], MEMORY),
        Row("anonymous memory of a load by transformers ÷ weights", memory["transformers"]),
        Row("time of a load ÷ readinto of the warm files", ratios["bare"][0], TIME, ratios["bare"][1]),
        Row("time of a load ÷ transformers' own", ratios["transformers"][0], None, ratios["transformers"][1]),
        Row("seconds of a load", middle(times["ours"][1:])[0]),
    ]


if __name__ == "__main__":
    main()
