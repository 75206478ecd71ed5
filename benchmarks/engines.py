"""How well `dovetail verify` finds bugs inside other engines, and how often it raises an alarm on a clean one.

    python benchmarks/engines.py [--json] [--quick] [--engine mlx …] [--table FILE]

transformers makes a tiny random Llama. Each engine records it in its own environment (.peers/ENGINE, benchmarks/peers/make),
clean in float32 and bfloat16, then with one bug at a time in the weights or the config that it is given; our model has the
right ones. Engines without an environment are left out, and the number of engines is a row. Rows:

    first bad layer named right    of the models with a bug, over all engines
    cause named right              of the same
    clean pairs                    equal in float32; equal or rounding in bfloat16
"""

from __future__ import annotations

import functools
import json
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from measure import Goal, Row, arguments, progress, report
from real_servers import as_gguf
from safetensors.torch import load_file, save_file
from seeded_bugs import COMMON
from torch import Tensor

from dovetail.base.errors import FileError
from dovetail.proof.compare.dump_check import verify_dump
from dovetail.proof.compare.engines import engines, interpreter, recorded
from dovetail.proof.compare.prompt import random_prompt
from dovetail.proof.compare.sides import NativeSide
from dovetail.proof.compare.transformers_side import transformers

ROOT = Path(__file__).resolve().parents[1]
SEED, LENGTH, STEPS = 31_000, 14, 2
# heads of 32: vLLM has no CPU kernel for smaller ones
SIZES = {**COMMON, "hidden_size": 128, "intermediate_size": 176, "num_attention_heads": 4, "head_dim": 32}
Tensors = dict[str, Tensor]
Config = dict[str, Any]
# engines that take something else than a directory: (directory, dtype, interpreter) -> what they take
GIVEN: dict[str, Callable[[Path, str, Path], Path]] = {"llamacpp": functools.partial(as_gguf, vocabulary=False)}


class Bug(NamedTuple):
    """A change of the directory that the engine is given, the layer where it shows, and the names of its cause."""

    kind: str
    plant: Callable[[Tensors, Config], None]
    where: str
    causes: tuple[str, ...]


def swap(one: str, other: str) -> Callable[[Tensors, Config], None]:
    def plant(tensors: Tensors, config: Config) -> None:
        tensors[one], tensors[other] = tensors[other].clone(), tensors[one].clone()

    return plant


def rope_base(tensors: Tensors, config: Config) -> None:
    """Both where transformers 5 writes it and at the top level: mlx-lm 0.32.2 reads only the latter."""
    config["rope_parameters"]["rope_theta"] = config["rope_theta"] = 500_000.0


def eps(tensors: Tensors, config: Config) -> None:
    config["rms_norm_eps"] = 1e-5


def transposed(tensors: Tensors, config: Config) -> None:
    name = "model.layers.1.self_attn.o_proj.weight"
    tensors[name] = tensors[name].T.contiguous()


def other_layer(tensors: Tensors, config: Config) -> None:
    for name in [name for name in tensors if name.startswith("model.layers.3.")]:
        tensors[name] = tensors[name.replace("layers.3.", "layers.0.")].clone()


def pair_order(tensors: Tensors, config: Config) -> None:
    for x in "qk":
        name = f"model.layers.2.self_attn.{x}_proj.weight"
        tensors[name] = tensors[name].unflatten(0, (-1, 2, 16)).transpose(1, 2).flatten(0, 2).contiguous()


def plus_one(tensors: Tensors, config: Config) -> None:
    tensors["model.norm.weight"] += 1


BUGS = (
    Bug("gate and up swapped", swap(*(f"model.layers.1.mlp.{x}_proj.weight" for x in ("gate", "up"))), "layers.1",
        ("gate and up swapped",)),
    Bug("rope base", rope_base, "layers.0", ("rope base",)),
    Bug("norm's eps", eps, "layers.0", ("norm's eps",)),
    Bug("norms swapped", swap(*(f"model.layers.2.{x}_layernorm.weight" for x in ("input", "post_attention"))), "layers.2",
        ("swapped norms",)),
    Bug("square weight transposed", transposed, "layers.1", ("transposed weight",)),
    Bug("another layer's weights", other_layer, "layers.3", ("another layer's weights",)),
    Bug("rotary pair order", pair_order, "layers.2", ("rotary pair order",)),
    Bug("norm's + 1", plus_one, "head", ("norm's + 1",)),
)  # fmt: skip


@torch.no_grad()
def write_model(place: Path) -> Path:
    """Save a tiny random Llama; its weights are far from initial ones."""
    library, draw = transformers(), torch.Generator().manual_seed(SEED)
    config = library.AutoConfig.for_model("llama", **SIZES, tie_word_embeddings=False)
    model: Any = library.AutoModelForCausalLM.from_config(config)
    for tensor in model.parameters():
        noise = torch.randn(tensor.shape, generator=draw)
        tensor.copy_(tensor + 0.3 * noise if tensor.dim() == 1 else 0.15 * noise)
    model.save_pretrained(place)
    return place


def written(clean: Path, place: Path, bug: Bug) -> Path:
    """A copy of the directory with a bug."""
    shutil.copytree(clean, place)
    tensors, config = load_file(place / "model.safetensors"), json.loads((place / "config.json").read_text())
    bug.plant(tensors, config)
    save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})
    (place / "config.json").write_text(json.dumps(config))
    return place


def at_hand(names: list[str] | None) -> dict[str, Path]:
    """The interpreters of the engines whose environments are there."""
    found: dict[str, Path] = {}
    peers = {place.name.replace(".", ""): place / "bin" / "python" for place in sorted((ROOT / ".peers").glob("*"))}
    for name in names or engines():
        try:
            found[name] = interpreter(name, peers.get(name))
        except FileError as error:
            print(error, file=sys.stderr)
    return found


def verdict_of(side: NativeSide, engine: str, python: Path, directory: Path, dtype: str) -> dict[str, Any]:
    """The verdict on a directory in an engine."""
    assert side.spec is not None
    ids = random_prompt(side.spec, length=LENGTH, seed=SEED).inputs.tolist()
    model = GIVEN[engine](directory, dtype, python) if engine in GIVEN else directory
    with recorded(engine, str(model), ids, steps=STEPS, dtype=dtype, python=python) as dump:
        verdict = verify_dump(side, dump)
    cause = None if verdict.cause is None else verdict.cause.name
    first = None if verdict.first is None else verdict.first.address
    found = {"engine": dump.engine, "dtype": dtype, "status": verdict.status, "first": first, "layer": verdict.layer}
    return {**found, "cause": cause}


def run(pythons: dict[str, Path], bugs: tuple[Bug, ...]) -> list[dict[str, Any]]:
    """Every clean pair and every bug, in every engine."""
    cases: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, progress("engines", len(pythons) * (2 + len(bugs))) as tick:
        place = Path(folder)
        clean = write_model(place / "clean")
        side = NativeSide(clean)
        for engine, python in pythons.items():
            for dtype in ("float32", "bfloat16"):
                cases.append({"kind": "clean", **verdict_of(side, engine, python, clean, dtype)})
                print(cases[-1], file=sys.stderr, flush=True)
                tick()
            for bug in bugs:
                directory = written(clean, place / f"{engine}-{bug.kind}".replace(" ", "-"), bug)
                case = {"kind": bug.kind, "where": bug.where, **verdict_of(side, engine, python, directory, "float32")}
                right = case["status"] == "structural" and case["layer"] == bug.where
                cases.append({**case, "layer_right": right, "cause_right": case["cause"] in bug.causes})
                print(cases[-1], file=sys.stderr, flush=True)
                tick()
    return cases


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.set_defaults(threads=1)
    parser.add_argument("--engine", action="append", help="an engine; may be given many times (default: all at hand)")
    parser.add_argument("--table", type=Path, help="write every case as JSON")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    warnings.filterwarnings("ignore")
    pythons = at_hand(given.engine)
    cases = run(pythons, BUGS[:2] if given.quick else BUGS)
    if given.table is not None:
        given.table.write_text(json.dumps(cases, indent=1) + "\n")
    clean, bugs = [one for one in cases if one["kind"] == "clean"], [one for one in cases if one["kind"] != "clean"]
    exact, narrow = ([one for one in clean if one["dtype"] == dtype] for dtype in ("float32", "bfloat16"))
    total = max(len(bugs), 1)
    rows = [
        Row("first bad layer named right", sum(one["layer_right"] for one in bugs) / total, Goal(low=1.0)),
        Row("cause named right", sum(one["cause_right"] for one in bugs) / total, Goal(low=2 / 3)),
        Row("clean pairs not equal in float32", sum(one["status"] != "equal" for one in exact), Goal(high=0)),
        Row("clean pairs not rounding in bfloat16", sum(one["status"] != "rounding" for one in narrow), Goal(high=0)),
        Row("models with a bug", len(bugs)),
        Row("engines", len(pythons)),
    ]
    report(rows, given.json)


if __name__ == "__main__":
    main()
