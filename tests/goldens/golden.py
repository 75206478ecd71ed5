"""Goldens: the stored results of every tiny preset and fifty sampled specs, so that a rename changes no bit.

    python tests/goldens/golden.py --write      rewrites results.json, after an intended change
    python tests/goldens/golden.py              compares bit for bit, and exits 1 where anything differs

Per spec: a digest of the float64 logits and eight of them, the loss, 16 greedy tokens, the bytes of the decode state, the
account. A digest depends on the kernels of the processor: the test compares numbers, this script compares bits.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch

from dovetail.account import account
from dovetail.base.errors import SpecError
from dovetail.decoding.generation import check_generates, generate_tokens
from dovetail.disk.yaml import dump_yaml
from dovetail.files.spec import from_yaml, load_spec, zoo
from dovetail.model.construction import generator
from dovetail.model.model import Model
from dovetail.nn.ctx import Losses
from dovetail.proof.laws.case import DTYPE, Case
from dovetail.state.pool import Pool

HERE = Path(__file__).parent
SPECS, RESULTS = HERE / "sampled.yaml", HERE / "results.json"
SAMPLED, SHOWN = 50, 8


def specs() -> dict[str, Model]:
    """Name -> spec of everything that has a golden."""
    sampled = SPECS.read_text().split("---\n")
    presets = {name: load_spec(name) for name in zoo() if name.endswith("-tiny")}
    return presets | {f"sampled-{i:02}": from_yaml(text) for i, text in enumerate(sampled)}


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:24]


def compute(spec: Model) -> dict[str, Any]:
    """What is kept of one spec."""
    case = Case(spec)
    with torch.no_grad():
        logits = case.run()
    flat = logits.flatten()
    found: dict[str, Any] = {
        "logits": digest(flat.numpy().tobytes()),
        "some_logits": flat[torch.linspace(0, len(flat) - 1, SHOWN).long()].tolist(),
    }
    if spec.head is not None:
        shape = logits.shape[:-1] if not spec.head.pools() else logits.shape[:1]
        labels = spec.head.labels(case.scope, tuple(shape), generator(0, "labels"))
        with torch.no_grad():
            found["loss"] = case.model.loss(case.inputs, labels, case.ctx(losses=Losses())).item()
    try:
        check_generates(spec)
        prompt = case.inputs[0, :7] if spec.encoder is None else case.source[0, :7]
        found["greedy"] = list(generate_tokens(case.model, prompt, 16, start=() if spec.encoder is None else (3,)))
    except SpecError:
        pass
    pool = Pool(spec, 2, 24, dtype=DTYPE, source=7)
    found["state_bytes"] = pool.bytes()
    data = account(spec).to_dict()
    tree = data.pop("tree")
    found["account"] = data
    found["shapes"] = digest(json.dumps(shapes(tree), sort_keys=True).encode())
    return found


def shapes(node: dict[str, Any]) -> dict[str, Any]:
    """Path -> shape of every tensor in an account's tree; kinds are left out, for their names may change."""
    own = {f"{node['path']}.{name}": shape for name, shape in node["shapes"].items()}
    return own | {k: v for child in node["children"] for k, v in shapes(child).items()}


def stored() -> dict[str, Any]:
    return json.loads(RESULTS.read_text())


def main(arguments: list[str]) -> int:
    torch.set_num_threads(1)
    if "--sample" in arguments:
        from dovetail.proof.laws.cover import quick_specs

        SPECS.write_text("---\n".join(dump_yaml(spec.to_data()) for spec in quick_specs(seed=11, count=SAMPLED)))
    results = {name: compute(spec) for name, spec in specs().items()}
    if "--write" in arguments:
        lines = [f"{json.dumps(name)}: {json.dumps(result)}" for name, result in results.items()]
        RESULTS.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        return 0
    want = stored()
    wrong = [f"{name}.{key}" for name in want for key in want[name] if results[name].get(key) != want[name][key]]
    print("\n".join(wrong) or f"{len(want)} goldens are bit-equal")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
