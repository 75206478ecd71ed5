"""What one swap brings with it, for the picture of the front page: cost, kept weights, laws, and the loss of two short runs.

    python benchmarks/front.py [--json]

`llama-tiny`, and the same spec with Gated DeltaNet in place of attention. Both train on the help texts of Python with the same
batches, the same number of steps and the same learning rate. The rate is tuned for neither side, so the losses rank nothing:
they show that the new model trains. `docs/front_picture.py` draws the figure.
"""

from __future__ import annotations

import json
import platform
import sys
import tempfile
from pathlib import Path
from pydoc_data.topics import topics

import torch
from measure import Goal, Row, arguments, report, versions

import dovetail as dt

BASE, GROUP, KIND = "llama-tiny", "mixer", "gated_deltanet"
LENGTH = 16_384  # tokens whose decode state is compared
STEPS = 60


def specs() -> dict[str, dt.Model]:
    """The spec before the swap and after it."""
    base = dt.load_spec(BASE)
    return {"before": base, "after": base.swap(GROUP, KIND)}


def counts() -> dict[str, int]:
    """What needs no training and no law: exact, and computed in seconds."""
    both, found = specs(), dict[str, int]()
    for side, spec in both.items():
        account = dt.show(spec, length=LENGTH).to_dict()
        found |= {
            f"{side}: parameters": account["parameters"],
            f"{side}: matmul FLOP per token": account["flops_per_token"]["matmul"],
            f"{side}: bytes of decode state at {LENGTH} tokens, bf16": account["state_bytes"],
        }
    summary = dt.diff(both["before"], both["after"]).to_dict()["summary"]
    return found | {f"tensors {status}": number for status, number in summary.items()}


def laws(quick: bool) -> list[Row]:
    """How many laws hold after the swap."""
    only = ("causal", "padded") if quick else ()
    found = dt.laws(specs()["after"], only=only).to_dict()["laws"]
    states = [law["state"] for law in found]
    for law in found:
        if law["state"] == "failed":  # on stderr: it may be a rank that did not answer in time
            print(json.dumps(law, ensure_ascii=False), file=sys.stderr)
    return [
        Row("laws passed", states.count("passed")),
        Row("laws failed", states.count("failed"), Goal(high=0)),
        Row("laws not applicable", states.count("not applicable")),
    ]


def losses(spec: dt.Model, steps: int) -> tuple[list[float], float]:
    """The training loss of each step, and the held-out loss at the end."""
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "topics.txt"
        text.write_text("\n\n".join(topics.values()), encoding="utf-8")
        run = Path(folder) / "run"
        dt.train(spec, text, out=run, steps=steps, sample=0, quiet=True)
        lines = [json.loads(line) for line in (run / "loss.jsonl").read_text(encoding="utf-8").splitlines()]
    return [round(line["loss"], 4) for line in lines], lines[-1]["val_loss"]


def main() -> None:
    flags = arguments(__doc__ or "").parse_args()
    torch.set_num_threads(flags.threads)
    steps = 2 if flags.quick else STEPS
    exact, curves = counts(), dict[str, list[float]]()
    rows = [*(Row(name, number) for name, number in exact.items()), *laws(flags.quick)]
    for side, spec in specs().items():
        curves[side], held_out = losses(spec, steps)
        rows.append(Row(f"{side}: held-out loss after {steps} steps", held_out))
    if not flags.json:
        report(rows, as_json=False)
        return
    used = {**versions(), "text": f"pydoc topics of Python {platform.python_version()}"}
    data = {"rows": [row.data() for row in rows], "versions": used, "counts": exact, "curves": curves}
    print(json.dumps(data, ensure_ascii=False))


if __name__ == "__main__":
    main()
