"""Inputs of the attack on the command line, continued: directories and files that verbs write for each other, then edited.

    run, adapter, peft, small       a training run, a LoRA in our layout and in peft's, a quantized model
    rows.jsonl, images.npz, table.parquet, rollouts.jsonl, dump/

Each JSON and YAML file has values replaced by odd ones, checksums renewed; binary files are cut, damaged or made to expand;
text is piped to chat; and every verb that writes is given a file that exists.
"""

from __future__ import annotations

import copy
import io
import json
import math
import random
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from hostile_inputs import BASE, EVIL, PRECIOUS, Input, Prepare

from dovetail.disk.shape import data_sha256

ODD: list[Any] = [None, "x", EVIL, -1, 1.5, True, 10**12, [], {}, [[1]], [{"a": []}], {"a": [1]}, math.inf, "9" * 5000]
ROW = {"messages": [{"role": "user", "content": "It was"}, {"role": "assistant", "content": "the best of times"}]}
ROLLOUT = {"prompt_ids": [3, 14], "completion_ids": [15, 9], "logprobs": [-0.2, -1.7], "temperature": 1.0}
DUMP = {"format": "dovetail-dump-1", "engine": "x", "dtype": "float32", "sharding": {}, "passes": []}
BASE |= {
    "plan": ("plan", "spec.yaml", "--gpus", "2", "--length", "16", "--batch", "4", "--top", "1"),
    "tune": ("tune", "model", "--data", "rows.jsonl", "--template", "plain", "--steps", "2", "--batch", "2", "--length", "64"),
    "runs": ("runs", "run"),
    "quantize": ("quantize", "model", "--format", "int8"),
    "merge": ("merge", "model", "adapter"),
    "match": ("match", "spec.yaml", "spec.yaml", "--params"),
    "chat": ("chat", "model", "--max-tokens", "2"),
    "serve": ("serve", "nowhere", "--port", "0"),
    "can-serve": ("can-serve", "spec.yaml"),
    "record": ("record", "transformers", "nowhere", "-o", "out"),
    "tiny": ("tiny", "spec.yaml", "-o", "out"),
}


def more_fixtures(folder: Path) -> None:
    """Write the directories and files of this attack beside those of `fixtures`."""
    from dovetail.api.models import load
    from dovetail.api.quantize import quantize
    from dovetail.api.train import train
    from dovetail.hf.peft import write_peft
    from dovetail.weights.adapters.attach import attach, read_adapter
    from dovetail.weights.adapters.storage import Stored, adapter_tensors, write_adapter

    train(folder / "spec.yaml", folder / "text.txt", steps=2, batch=2, length=8, out=folder / "run", quiet=True, sample=0)
    quantize(folder / "model", format="int8", out=folder / "small")
    model, kind = load(folder / "model"), read_adapter({"kind": "lora", "rank": 2, "targets": ["q"]})
    attach(model, kind)
    stored = Stored(kind, None, adapter_tensors(model))
    for name in ("adapter", "peft"):
        (folder / name).mkdir()
    write_adapter(folder / "adapter", stored)
    write_peft(folder / "peft", model.spec, stored)
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(ROW)}\n" for _ in range(12)))
    (folder / "rollouts.jsonl").write_text(json.dumps(ROLLOUT) + "\n")
    (folder / PRECIOUS).write_text("precious")
    (folder / "precious.npz").write_text("precious")


def changed(data: Any, rng: random.Random, count: int) -> Iterator[tuple[str, Any]]:
    """A sample of copies of the data with one value replaced or left out, and their names."""

    def walk(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
        yield path
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, one in items:
            yield from walk(one, (*path, key))

    places = [path for path in walk(data, ()) if path]
    for path in rng.choices(places, k=count):
        new = rng.choice([*ODD, ...])
        copied = copy.deepcopy(data)
        where = copied
        for key in path[:-1]:
            where = where[key]
        if new is ...:
            del where[path[-1]]
        else:
            where[path[-1]] = new
        yield f"{'.'.join(map(str, path))[:60]} {str(new)[:12]!r}", copied


def _edits(name: str, seed: int) -> Prepare:
    """Change one value of a JSON, YAML or JSON Lines file, and renew the checksum that it has of itself."""

    def prepare(folder: Path) -> None:
        file = next(folder.glob(name))
        text = file.read_text()
        data = json.loads(text.splitlines()[0]) if name.endswith(".jsonl") else yaml.safe_load(text)
        _, edited = next(changed(data, random.Random(seed), 1))
        if isinstance(edited, dict) and "sha256" in edited:
            bare = {key: value for key, value in edited.items() if key != "sha256"}
            edited = {**bare, "sha256": data_sha256(bare)}
        file.write_text(json.dumps(edited) + "\n")

    return prepare


READERS: dict[str, tuple[tuple[str, ...], ...]] = {  # file -> the verbs that read it
    "run/run.yaml": (("runs", "run"), ("train", "run/run.yaml", "--steps", "2", "--sample", "0")),
    "run/initial.json": (("runs", "run", "run"),),
    "run/loss.jsonl": (("runs", "run"),),
    "run/dovetail.yaml": (("train", "--from", "run", "--text", "text.txt", "--steps", "1", "-o", "out"),),
    "run/checkpoints/step-*/manifest.json": (("train", "--from", "run", "--text", "text.txt", "--steps", "1", "-o", "out"),),
    "tokens/manifest.json": (("data show", "tokens"), ("train", "spec.yaml", "--data", "tokens", "--steps", "1", "-o", "out")),
    "peft/adapter_config.json": (("merge", "model", "peft", "-o", "out"),),
    "adapter/adapter.yaml": (("merge", "model", "adapter", "-o", "out"),),
    "small/quantization.yaml": (("generate", "small", "It", "--max-tokens", "1"), ("show", "small")),
    "small/dovetail.yaml": (("generate", "small", "It", "--max-tokens", "1"),),
    "rows.jsonl": ((*BASE["tune"], "-o", "out"), ("data show", "rows.jsonl", "--model", "model", "--template", "plain")),
    "rollouts.jsonl": (("verify", "model", "rollouts:rollouts.jsonl"),),
    "hf/config.json": (("tiny", "hf/config.json", "-o", "out"), ("can-serve", "hf")),
}


def edited_inputs(count: int) -> Iterator[Input]:
    """Every file with `count` changes per verb that reads it."""
    for name, verbs in READERS.items():
        for args in verbs:
            for seed in range(count):
                yield Input(f"edited {name} {args[0]} {seed}", args, _edits(name, seed))


def binary_inputs(rng: random.Random) -> Iterator[Input]:
    """Parquet, .npz, dumps and tensors of adapters that are cut, damaged or expand."""
    import pyarrow as pa
    import pyarrow.parquet as parquet

    def table(texts: Any, **options: Any) -> bytes:
        file = io.BytesIO()
        parquet.write_table(pa.table({"text": texts}), file, **options)
        return file.getvalue()

    good = table(pa.array(["It was the best of times."] * 20))
    bomb = pa.DictionaryArray.from_arrays(pa.array([0] * 200, pa.int32()), pa.array(["a" * 5_000_000]))
    tables = {"good": good, "bomb": table(bomb, compression="zstd"), "numbers": table(pa.array([1, 2])), "none": b""}
    tables |= {"nulls": table(pa.array([None, "a"])), "nested": table(pa.array([["a"], ["b"]]))}
    tables |= {f"cut {i}": good[: rng.randrange(len(good))] for i in range(20)}
    tables |= {f"damaged {i}": _damaged(good, rng) for i in range(60)}
    for name, data in tables.items():
        args = ("data build", "odd.parquet", "-o", "out", "--workers=1")
        yield Input(f"parquet {name}", args, _puts("odd.parquet", data), must_fail=name in ("bomb", "none", "numbers"))
    images = io.BytesIO()
    np.savez(images, images=np.zeros((12, 32, 32, 3), np.uint8), labels=np.arange(12) % 3)
    arrays = {
        "good": images.getvalue(),
        "empty": b"",
        "zip": _zip("images.npy", b"x"),
        "huge": _zip("images.npy", _header(10**12)),
    }
    arrays["pickle"] = _zip(
        "images.npy", b"\x93NUMPY\x01\x00v\x00{'descr': '|O', 'fortran_order': False, 'shape': (1,), }".ljust(128)
    )
    arrays |= {f"damaged {i}": _damaged(images.getvalue(), rng) for i in range(60)}
    for name, data in arrays.items():
        args = ("train", "vit-tiny", "--labels", "odd.npz", "--steps", "1", "--batch", "2", "-o", "out")
        yield Input(f"npz {name}", args, _puts("odd.npz", data), must_fail=name in ("empty", "zip", "huge", "pickle"))
    for name in ("adapter/adapter.safetensors", "peft/adapter_model.safetensors", "small/model.safetensors"):
        for i in range(25):
            args = (
                ("generate", "small", "It") if name.startswith("small") else ("merge", "model", name.split("/")[0], "-o", "out")
            )
            yield Input(f"damaged {name} {i}", args, _damages(name, i))
    for i, (_, dump) in enumerate(changed(DUMP, rng, 60)):
        yield Input(
            f"dump {i}", ("verify", "model", "dump:dump"), _puts("dump/dump.json", json.dumps(dump).encode()), must_fail=True
        )


def _header(count: int) -> bytes:
    text = f"{{'descr': '|u1', 'fortran_order': False, 'shape': ({count},), }}".ljust(117).encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


def _zip(name: str, data: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(name, data)
    return file.getvalue()


def _damaged(data: bytes, rng: random.Random) -> bytes:
    changed_bytes = bytearray(data)
    for _ in range(rng.choice((1, 4, 30))):
        changed_bytes[rng.randrange(len(changed_bytes))] = rng.randrange(256)
    return bytes(changed_bytes)


def _puts(name: str, data: bytes) -> Prepare:
    def prepare(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)

    return prepare


def _damages(name: str, seed: int) -> Prepare:
    def prepare(folder: Path) -> None:
        (folder / name).write_bytes(_damaged((folder / name).read_bytes(), random.Random(seed)))

    return prepare


PIPED = [b"", b"\n", b"\xff\xfe\n", b"/save precious.txt\n", b"/bye\n", b"a\0b\n", b"x" * 300_000, b"\x1b[2K\n", b"hello\n" * 3]
PIPED += ["\ud800\n".encode("utf-8", "surrogatepass"), b"<|end|>\n", b"/save /etc/passwd\n", "天地玄黃\n".encode()]


def piped_inputs() -> Iterator[Input]:
    """Text on the stdin of chat."""
    for i, data in enumerate(PIPED):
        for flags in ((), ("--json",), ("--system", EVIL)):
            yield Input(f"piped {i} {len(flags)}", (*BASE["chat"], *flags), stdin=data)


def overwriting_inputs() -> Iterator[Input]:
    """Every verb that writes, with a file that exists, and without --force."""
    for args in (
        ("show", "spec.yaml", "--html", PRECIOUS),
        ("diff", "spec.yaml", "spec.yaml", "--html", PRECIOUS),
        (*BASE["map"], "-o", PRECIOUS),
        ("emit", "spec.yaml", "-o", PRECIOUS),
        (*BASE["plan"], "-o", PRECIOUS),
        ("runs", "run", "--plot", PRECIOUS),
        ("train", "spec.yaml", "--mup-check", PRECIOUS, "--text", "text.txt"),
        *((*BASE[verb], "-o", PRECIOUS) for verb in ("train", "graft", "quantize", "merge", "tune")),
        *((verb, source, "-o", PRECIOUS) for verb, source in (("import", "hf"), ("export", "model"), ("tiny", "spec.yaml"))),
        ("data build", "text.txt", "-o", PRECIOUS),
        ("record", "transformers", "model", "-o", PRECIOUS),
    ):
        yield Input(f"overwrite {args[0]} {args[-2]}", args, must_fail=True)


def file_inputs(seed: int) -> list[Input]:
    """All inputs of this file."""
    rng = random.Random(seed)
    return [*edited_inputs(40), *binary_inputs(rng), *piped_inputs(), *overwriting_inputs()]
