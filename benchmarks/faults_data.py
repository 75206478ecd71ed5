"""Faults of the data pipeline: kills, other world sizes, damaged shards, failing disks; each row has a pass criterion.

    python benchmarks/faults_data.py [--json] [--quick] [D1 D2 …]

A sample is one token whose id is its number in the corpus, so a missing or repeated sample shows. In D1 a child process trains
"all ranks" and commits the samples of a step together with the loader's state, as a run does; it is ended by SIGKILL at random.
"""

from __future__ import annotations

import argparse
import array
import errno
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dovetail.base.errors import FileError
from dovetail.data import blocks
from dovetail.data.blocks import BLOCK
from dovetail.data.corpora import CorpusTokens, ShardedTokens, open_tokens
from dovetail.data.manifest import DataSplit, Manifest, TokenizerInfo
from dovetail.data.shards import ShardInfo, ShardWriter, dtype_for, index_bytes
from dovetail.data.stream import Stream

WORLDS, WORKERS = (1, 2, 4), (0, 1, 3)
VOCAB = 2**31 - 1
Result = dict[str, Any]


# -- corpora ----------------------------------------------------------------------------------------------------------------


def numbered(place: Path, samples: int, shards: int = 3) -> Path:
    """A corpus of `samples` windows of one token: token i has the id i."""
    place.mkdir(parents=True)
    cuts, infos = [(samples + 1) * i // shards for i in range(shards + 1)], list[ShardInfo]()
    for number, (start, stop) in enumerate(itertools.pairwise(cuts)):
        with ShardWriter(place, f"train-{number:05d}", dtype_for(VOCAB)) as writer:
            for low in range(start, stop, 1000):
                writer.add(np.arange(low, min(low + 1000, stop)), 1)
        assert writer.info is not None
        infos.append(writer.info)
    _write_manifest(place, infos)
    return place


def sparse(place: Path, samples: int, length: int = 8, documents: int = 1_000_000) -> Path:
    """A corpus of zeros of any size, whose ids take no room on the disk."""
    place.mkdir(parents=True)
    tokens, dtype = samples * length + 1, dtype_for(2)
    size = tokens * dtype.itemsize
    whole, rest = zlib.crc32(bytes(BLOCK)), zlib.crc32(bytes(size % BLOCK))
    crcs = [whole] * (size // BLOCK) + [rest] * (size % BLOCK > 0)
    ends = array.array("Q", np.linspace(tokens / documents, tokens, documents).astype("<u8").tobytes())
    with (place / "train-00000.bin").open("wb") as file:
        file.truncate(size)
    (place / "train-00000.idx").write_bytes(index_bytes(dtype.itemsize, tokens, crcs, ends))
    _write_manifest(place, [ShardInfo("train-00000", documents, tokens, 1, "0" * 64, "0" * 64)], vocab=2)
    return place


def _write_manifest(place: Path, infos: list[ShardInfo], vocab: int = VOCAB) -> None:
    splits = {"train": DataSplit(tuple(infos)), "held_out": DataSplit()}
    Manifest(TokenizerInfo("0" * 64, vocab, None), splits, {"duplicates": 0, "empty": 0}, {}).write(place)


def global_batches(tokens: CorpusTokens, batch: int, world: int, workers: int, samples: int) -> Iterator[list[int]]:
    """The sample numbers of each step, over all ranks, from a position."""
    from dovetail.data.loader import Loader

    loaders = [Loader(Stream(tokens, 1), batch=batch, rank=r, world=world, workers=workers, masks=False) for r in range(world)]
    for loader in loaders:
        loader.load_state({"samples": samples, "stream": loader.stream.fingerprint})
    for parts in zip(*loaders, strict=True):
        yield [number for part in parts for number in part.tokens.flatten().tolist()]


# -- rows -------------------------------------------------------------------------------------------------------------------


def d1(place: Path, samples: int = 1_000_003, kills: int = 10, batch: int = 997) -> Result:
    """Random kills, another world size and number of workers after each: every sample once."""
    corpus, log, rng = numbered(place / "corpus", samples), place / "log", random.Random(0)
    settings = list(itertools.product(WORLDS, WORKERS))
    done = 0
    for kill in range(kills + 1):
        world, workers = settings[kill % len(settings)]
        until = samples if kill == kills else (kill + rng.random()) * samples / (kills + 1)
        command = [sys.executable, __file__, "--consume", str(corpus), str(log), *map(str, (samples, batch, world, workers))]
        child = subprocess.Popen(command)
        while child.poll() is None and (kill == kills or _committed(log) < until):
            time.sleep(0.01)
        if kill < kills and child.poll() is None:
            child.send_signal(signal.SIGKILL)
            done += 1
        child.wait()
    consumed = np.fromfile(log / "samples", "<i8", _committed(log))[:samples]
    counts = np.bincount(consumed, minlength=samples)
    figures = {"samples": samples, "kills": done, "missing": int((counts == 0).sum()), "repeated": int((counts > 1).sum())}
    return _row("D1", figures, not figures["missing"] and not figures["repeated"] and done == kills)


def _committed(log: Path) -> int:
    try:
        return int((log / "state").read_text())
    except (FileNotFoundError, ValueError):
        return 0


def consume(corpus: str, log: str, samples: int, batch: int, world: int, workers: int) -> None:
    """Train all ranks until every sample was consumed; the samples of a step and the state are one commit."""
    place = Path(log)
    place.mkdir(exist_ok=True)
    position = _committed(place)
    with (place / "samples").open("ab") as file:
        file.truncate(position * 8)
        for numbers in global_batches(open_tokens(corpus), batch, world, workers, position):
            file.write(np.array(numbers, "<i8").tobytes())
            file.flush()
            position += batch
            (place / "state.tmp").write_text(str(position))
            os.replace(place / "state.tmp", place / "state")
            if position >= samples:
                os._exit(0)  # threads that read ahead do not matter any more


def d2(place: Path, samples: int = 10_007, batch: int = 24) -> Result:
    """World 4, then 2, then 3, in mid-epoch: the same global batches."""
    tokens = open_tokens(numbered(place / "corpus", samples))
    steps = samples // batch // 4
    whole = _steps(tokens, batch, 1, 0, 0, 3 * steps)
    parts = [_steps(tokens, batch, world, 1, i * steps * batch, steps) for i, world in enumerate((4, 2, 3))]
    return _row("D2", {"steps": 3 * steps}, whole == [step for part in parts for step in part])


def d3(place: Path, samples: int = 2003, batch: int = 16) -> Result:
    """Stops at the first and at the last batch of an epoch, and three resumes within it: the same sequence."""
    tokens = open_tokens(numbered(place / "corpus", samples))
    steps = -(-samples // batch) + 2
    whole = _steps(tokens, batch, 1, 0, 0, steps)
    stops = [0, 1, steps // 3, steps // 2, samples // batch, samples // batch + 1, steps]
    parts = [_steps(tokens, batch, 2, 1, low * batch, high - low) for low, high in itertools.pairwise(stops)]
    return _row("D3", {"steps": steps, "resumes": len(stops) - 2}, whole == [step for part in parts for step in part])


def d4(place: Path, samples: int = 2003, batch: int = 16, workers: int = 4) -> Result:
    """A state taken one step after a resume, while workers read ahead: the next resume is equal."""
    from dovetail.data.loader import Loader

    stream = Stream(open_tokens(numbered(place / "corpus", samples)), 1)
    whole = _steps(stream.sources[0], batch, 1, 0, 0, 12)
    steps, state = list[list[int]](), Loader(stream, batch=batch).state()
    for _ in range(12):
        loader = Loader(stream, batch=batch, workers=workers, masks=False)
        loader.load_state(state)
        batches = iter(loader)
        steps.append(next(batches).tokens.flatten().tolist())
        time.sleep(0.01)  # the workers read ahead
        state = loader.state()
        batches.close()  # pyright: ignore[reportAttributeAccessIssue]
    return _row("D4", {"resumes": 12, "workers": workers}, steps == whole)


def d5(place: Path, samples: int = 100_003, flips: int = 200) -> Result:
    """A shard's size or one byte changed, or the corpus built again: refused, and read only on request."""
    from dovetail.data.loader import Loader

    corpus, rng = numbered(place / "corpus", samples), random.Random(1)
    state = Loader(Stream(open_tokens(corpus), 1), batch=4).state()
    refused = 0
    for _ in range(flips):
        path = corpus / rng.choice([name for name in sorted(os.listdir(corpus)) if name.startswith("train")])
        with path.open("r+b") as file:
            at = rng.randrange(path.stat().st_size)
            before = _flip(file, at, 1 << rng.randrange(8))
            refused += _refused(lambda: _read_all(corpus))
            file.seek(at)
            file.write(before)
    sizes = 0
    for change in (-1, 1):
        path = corpus / "train-00001.bin"
        data = path.read_bytes()
        path.write_bytes(data[:-1] if change < 0 else data + b"\0")
        sizes += _refused(lambda: open_tokens(corpus))
        path.write_bytes(data)
    other = Loader(Stream(open_tokens(numbered(place / "other", samples - 1)), 1), batch=4)
    rebuilt = _refused(lambda: other.load_state(state))
    other.load_state(state, force=True)
    _read_all(corpus)
    figures = {"flips": flips, "refused": refused, "sizes refused": sizes, "other corpus refused": rebuilt}
    return _row("D5", figures, refused == flips and sizes == 2 and rebuilt)


def d6(place: Path, samples: int = 20_011, batch: int = 16, rate: float = 0.05, stall: float = 2.0, stalls: int = 3) -> Result:
    """Read errors and stalls: nothing is lost; a shard that cannot be read is named."""
    corpus, rng, lock = numbered(place / "corpus", samples), random.Random(2), threading.Lock()
    faults = {"errors": 0, "stalls": 0, "broken": 0}

    def pread(descriptor: int, size: int, offset: int) -> bytes:
        with lock:
            fails, stalled = rng.random() < rate, faults["stalls"] < stalls and rng.random() < 0.01
            faults["errors"] += fails
            faults["stalls"] += stalled
        if faults["broken"] and os.readlink(f"/proc/self/fd/{descriptor}").endswith("train-00001.bin"):
            fails = True
        if stalled:
            time.sleep(stall)
        if fails:
            raise OSError(errno.EIO, "Input/output error")
        return os.pread(descriptor, size, offset)

    before, blocks.RETRIES = blocks.RETRIES, (0.001,) * 6
    try:
        steps = min(samples // batch, 400)
        clean = _steps(open_tokens(corpus), batch, 1, 0, 0, steps)
        equal = clean == _steps(ShardedTokens(corpus, read=pread), batch, 2, 3, 0, steps)
        faults["broken"] = 1
        try:
            _steps(ShardedTokens(corpus, read=pread), batch, 1, 2, 0, steps)
            named = False
        except FileError as error:
            named = "train-00001.bin" in str(error)
    finally:
        blocks.RETRIES = before
    figures = {"errors": faults["errors"], "stalls": faults["stalls"], "equal": equal, "shard named": named}
    return _row("D6", figures, equal and named and faults["errors"] > 0)


def d7(place: Path, samples: int = 100_000_000) -> Result:
    """An index of many samples opens at once, in little memory; measured in a process of its own."""
    corpus = sparse(place / "corpus", samples)
    command = [sys.executable, __file__, "--open", str(corpus)]
    measured = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    passed = measured["samples"] == samples and measured["seconds"] <= 1 and measured["megabytes"] <= 50
    return _row("D7", measured, passed)


def opened(corpus: str) -> None:
    """Open a corpus, read 200 samples, and print the time of opening and the memory."""
    before = _resident()
    start = time.perf_counter()
    stream = Stream(open_tokens(corpus), 8)
    stream.sample(0)
    seconds = time.perf_counter() - start
    for number in range(200):
        stream.sample(number * 10_007)
    figures = {"samples": stream.sizes[0], "seconds": round(seconds, 3), "megabytes": round((_resident() - before) / 2**20, 1)}
    print(json.dumps(figures))


ROWS: dict[str, Callable[..., Result]] = {"D1": d1, "D2": d2, "D3": d3, "D4": d4, "D5": d5, "D6": d6, "D7": d7}
QUICK: dict[str, dict[str, Any]] = {
    "D1": {"samples": 3001, "kills": 2, "batch": 8},
    "D2": {"samples": 1001},
    "D3": {"samples": 203},
    "D4": {"samples": 203},
    "D5": {"samples": 5003, "flips": 12},
    "D6": {"samples": 2003, "stall": 0.1},
    "D7": {"samples": 3_000_000},
}


# -- tools ------------------------------------------------------------------------------------------------------------------


def _steps(tokens: CorpusTokens, batch: int, world: int, workers: int, samples: int, steps: int) -> list[list[int]]:
    return list(itertools.islice(global_batches(tokens, batch, world, workers, samples), steps))


def _row(name: str, figures: dict[str, Any], passed: bool) -> Result:
    return {"row": name, "passed": bool(passed), **figures}


def _refused(action: Callable[[], object]) -> bool:
    try:
        action()
    except FileError:
        return True
    return False


def _read_all(corpus: Path) -> None:
    tokens = open_tokens(corpus)
    tokens.read(0, tokens.tokens)
    tokens.ends(0, tokens.tokens)


def _flip(file: Any, at: int, bit: int) -> bytes:
    file.seek(at)
    before = file.read(1)
    file.seek(at)
    file.write(bytes([before[0] ^ bit]))
    file.flush()
    return before


def _resident() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("rows", nargs="*", default=list(ROWS))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--consume", nargs=6)
    parser.add_argument("--open")
    args = parser.parse_args()
    if args.consume:
        corpus, log, *numbers = args.consume
        consume(corpus, log, *map(int, numbers))
        return 0
    if args.open:
        opened(args.open)
        return 0
    results = list[Result]()
    for name in args.rows:
        with tempfile.TemporaryDirectory() as place:
            start = time.monotonic()
            results.append(ROWS[name](Path(place), **(QUICK[name] if args.quick else {})))
        if not args.json:
            print(f"{time.monotonic() - start:6.1f} s  {results[-1]}", flush=True)
    if args.json:
        print(json.dumps(results))
    return 0 if all(result["passed"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
