"""Loading a checkpoint of 2 GB: how much memory it takes, and how long, against reading the bare file and against transformers.

A random model in Llama's shape is written once, as Hugging Face lays it out; the file is warm when it is read. Each load is a
process of its own, which does its imports first. Anonymous memory is what the process really took for itself: pages that are
mapped from the file are not in it, and the pages it had before the load are taken off.

    bare    readinto of every file into fresh memory, in pieces of 64 MB

Files are mapped by ours and by transformers, so a load by itself reads next to nothing: what is timed is the load and one touch
of every page of every weight, as the first forward would do.
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
from measure import Goal, Row, agree, arguments, middle, progress, tell

from dovetail.construction import build
from dovetail.io.model_dir import spec_and, write_directory
from dovetail.io.spec import from_yaml
from dovetail.model import Model
from dovetail.port.load import load
from dovetail.port.write import CONFIG_FILE, exported

MEMORY = Goal(high=1.15)
TIME = Goal(high=1.5)
NOISE = 0.3  # spread of the ratio of times beyond which nothing is claimed
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
        """Two bytes a number: 1.0 billion of them are 2 GB."""
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
    """A checkpoint as Hugging Face lays it out, in bfloat16 and in files of 1 GB; its bytes of weights."""
    model = build(shape.spec(), dtype=torch.bfloat16)
    ported, pieces = exported(model, "llama", {})
    write_directory(place, pieces, {**spec_and(model.part, {}), CONFIG_FILE: json.dumps(ported.config).encode()}, shard=10**9)
    (place / "dovetail.yaml").unlink()  # as anyone else would have written it
    return sum(weight.nbytes for weight in model.parameters())


# -- the child: one load, measured ------------------------------------------------------------------------------------


def anonymous() -> int:
    """Bytes of memory this process took for itself."""
    with open("/proc/self/status") as lines:
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


class Peak:
    """The most anonymous memory while it watches, looked at every millisecond."""

    def __enter__(self) -> Peak:
        gc.collect()
        self.before = self.most = anonymous()
        self.over = False
        self.watch = threading.Thread(target=self._look)
        self.watch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over = True
        self.watch.join()
        self.most = max(self.most, anonymous())

    def _look(self) -> None:
        while not self.over:
            self.most = max(self.most, anonymous())
            time.sleep(0.001)


def bare(place: Path) -> Any:
    kept = []
    for path in sorted(place.glob("*.safetensors")):
        room = torch.empty(path.stat().st_size, dtype=torch.uint8)
        kept.append(room)
        view = memoryview(room.numpy())
        with path.open("rb", buffering=0) as file:
            done = 0
            while count := file.readinto(view[done : done + PIECE]):
                done += count
    return kept


def theirs(place: Path) -> Any:
    import transformers

    return transformers.LlamaForCausalLM.from_pretrained(place)


def touched(model: torch.nn.Module) -> Any:
    """The model after one byte of every page of its weights was read."""
    assert sum(int(weight.detach().reshape(-1).view(torch.uint8)[::4096].sum()) for weight in model.parameters()) > 0
    return model


WAYS: dict[str, Callable[[Path], Any]] = {
    "ours": lambda place: touched(load(place)),
    "bare": bare,
    "transformers": lambda place: touched(theirs(place)),
}


def child(way: str, place: Path, threads: int, watched: bool) -> None:
    """Print the seconds of one load and the anonymous memory it took; memory is watched in a run that is not timed."""
    torch.set_num_threads(threads)
    if way == "transformers":
        import transformers
        from transformers.models.llama import modeling_llama

        transformers.utils.logging.disable_progress_bar()
        assert modeling_llama
    if watched:
        with Peak() as peak:
            kept = WAYS[way](place)
        print(json.dumps({"memory": peak.most - peak.before}))
    else:
        begin = time.perf_counter()
        kept = WAYS[way](place)
        print(json.dumps({"seconds": time.perf_counter() - begin}))
    assert kept


def ask(way: str, place: Path, threads: int, *, watched: bool = False) -> float:
    """The same in a process of its own."""
    flags = ["--child", way, "--place", str(place), "--threads", str(threads), *(["--watched"] if watched else [])]
    done = subprocess.run([sys.executable, __file__, *flags], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{way}: {done.stderr[-2000:]}")
    told = json.loads(done.stdout.splitlines()[-1])
    return told["memory"] if watched else told["seconds"]


def same_weights(place: Path) -> None:
    """Before anything is timed: both loads hold the same numbers."""
    ours, reference = load(place), theirs(place)
    pairs = {"embed.table": "model.embed_tokens.weight", "layers.1.ffn.down.weight": "model.layers.1.mlp.down_proj.weight"}
    for mine, other in pairs.items():
        agree(mine, ours.get_parameter(mine).double(), reference.get_parameter(other).double(), 0.0)


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=7, help="paired rounds of each time")
    parser.add_argument("--child", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--place", type=Path, help="where the checkpoint is written; a temporary place by default")
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
        tell(measured(place, size, flags), flags.json)


def measured(place: Path, size: int, flags: argparse.Namespace) -> list[Row]:
    memory = {way: ask(way, place, flags.threads, watched=True) / size for way in ("ours", "transformers")}
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    with progress("loads", (flags.rounds + 1) * len(WAYS)) as tick:
        for i in range(flags.rounds + 1):
            for way in list(WAYS) if i % 2 else reversed(WAYS):
                times[way].append(ask(way, place, flags.threads))
                tick()
    ratios = {way: middle([a / b for a, b in zip(times["ours"][1:], times[way][1:], strict=True)]) for way in WAYS}
    return [
        Row("checkpoint, GB", size / 1e9),
        Row("anonymous memory of a load ÷ weights", memory["ours"], MEMORY),
        Row("anonymous memory of a load by transformers ÷ weights", memory["transformers"]),
        Row("time of a load ÷ readinto of the warm files", ratios["bare"][0], TIME, ratios["bare"][1], NOISE),
        Row("time of a load ÷ transformers' own", ratios["transformers"][0], None, ratios["transformers"][1]),
        Row("seconds of a load", middle(times["ours"][1:])[0]),
    ]


if __name__ == "__main__":
    main()
