"""The loss after changes of a trained model by `dovetail graft`, and after one minute of further training.

A small Llama with as many KV heads as heads is trained on text that ships with Python. Each change starts from this model.
Losses are in nats per token on held-out text. The row `nothing` changes nothing and is trained further as well: compare the
others with it. Where a family of Hugging Face can express the new spec, transformers loads the export and the largest
difference of logits is reported; otherwise the message that refuses the export.

    python benchmarks/graft.py --json
"""

from __future__ import annotations

import dataclasses as dc
import json
import os
import re
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from measure import arguments, progress, versions
from prose import python_text
from rich.console import Console
from rich.table import Table

from dovetail.hf.load import load
from dovetail.nn.ctx import Ctx
from dovetail.nn.layout import TokenLayout

MAX_DIFFERENCE = 1e-5  # of logits, between Dovetail and transformers
SPEC_REFUSED = 3  # exit code
TRAINED = 128  # tokens per training sequence


@dc.dataclass(frozen=True)
class Surgery:
    """Flags of `dovetail graft`, and the length of the sequences it is evaluated on."""

    name: str
    flags: tuple[str, ...]
    length: int = TRAINED


def surgeries(layers: int, vocab: int) -> list[Surgery]:
    last = layers - 1
    yarn = "--set=layers.*.mixer.position.scaling={{kind: yarn, factor: 4, original: {}}}"
    window = "--set=layers.*.mixer.mask=[causal, {{kind: window, size: 32, keep: {}}}]"
    return [
        Surgery("nothing", (f"--set=vocab={vocab}",)),
        Surgery("8 KV heads pooled to 2", ("--set=layers.*.mixer.kv_heads=2",)),
        Surgery("8 KV heads pooled to 1", ("--set=layers.*.mixer.kv_heads=1",)),
        Surgery("nothing, evaluated at 4 times the length", (f"--set=vocab={vocab}",), 4 * TRAINED),
        Surgery("YaRN, evaluated at 4 times the length", (yarn.format(TRAINED),), 4 * TRAINED),
        Surgery("a window of 32", (window.format(0),)),
        Surgery("a window of 32, the first 4 kept", (window.format(4),)),
        Surgery(f"{layers} layers, one removed", (f"--layers=0-{last - 2},{last}",)),
        Surgery(f"{layers} layers, two of them repeated", (f"--layers=0-{last - 2},{last - 3}-{last}",)),
        Surgery("64 tokens added to the vocabulary", (f"--set=vocab={vocab + 64}",)),
        Surgery("an untied head", ("--set=head.tied=false",)),
    ]


def run(*args: str) -> subprocess.CompletedProcess[str]:
    """Run a verb as a user does, on as many threads as this process has."""
    env = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    return subprocess.run([sys.executable, "-m", "dovetail.cli", *args], capture_output=True, text=True, check=False, env=env)


def report_of(*args: str) -> dict[str, Any]:
    """Run a verb with --json and return its report."""
    done = run(*args, "--json")
    if done.returncode:
        raise SystemExit(f"dovetail {' '.join(args)}:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout)


def grafted(trained: Path, text: Path, surgery: Surgery, minutes: float, out: Path) -> dict[str, Any]:
    """Return one row: the losses, and the difference of the export's logits or the message that refuses it."""
    flags = [str(trained), *surgery.flags, "--text", str(text), "--heal", str(minutes), "--length", str(surgery.length)]
    batch = str(8 * TRAINED // surgery.length)  # the same number of tokens per step
    report = report_of("graft", *flags, "--batch", batch, "-o", str(out), "--force")
    row: dict[str, Any] = {"name": surgery.name, "flags": list(surgery.flags), "length": surgery.length, **report["loss"]}
    row |= {"parameters": report["parameters"]["after"], "steps": report["healing"]["steps"]}
    hf = out.with_name("hf")
    export = run("export", str(out), "-o", str(hf), "--force", "--json")
    if export.returncode == SPEC_REFUSED:
        return row | {"family": None, "logits": None, "refused": export.stderr.strip().removeprefix("dovetail: ")}
    if export.returncode:
        raise SystemExit(export.stderr[-2000:])
    return row | {"family": json.loads(export.stdout)["model_type"], "logits": logit_difference(hf), "refused": None}


@torch.no_grad()
def logit_difference(directory: Path) -> float:
    """Return the largest difference between the logits of Dovetail and of transformers, on 2 rows of random tokens."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    ours = load(directory)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = transformers.AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()
    tokens = torch.randint(0, ours.part.vocab, (2, 200), generator=torch.Generator().manual_seed(0))
    return (ours(tokens, Ctx(layout=TokenLayout.whole(2, 200))) - theirs(tokens).logits).abs().max().item()


def show(rows: list[dict[str, Any]]) -> None:
    table = Table("change", "parameters", "before", "after", "healed", "export", caption="nats per token, held out")
    for row in rows:
        export = f"{row['family']}: logits within {row['logits']:.0e}" if row["family"] else f"refused: {row['refused']}"
        losses = [f"{row[name]:.3f}" for name in ("before", "after", "healed")]
        table.add_row(row["name"], f"{row['parameters']:,}", *losses, export)
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--train", type=float, default=2.0, help="minutes of training")
    parser.add_argument("--heal", type=float, default=1.0, help="minutes of further training after each change")
    parser.add_argument("--only", default="", help="only changes whose name matches this regular expression")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    train, heal = (0.02, 0.01) if args.quick else (args.train, args.heal)
    base = ["--set=layers.*.mixer.kv_heads=8"] + (["--set=width=64", "--set=layers.*.ffn.hidden=96"] if args.quick else [])
    with tempfile.TemporaryDirectory() as place:
        text, trained = Path(place) / "text.txt", Path(place) / "trained"
        text.write_text(python_text(most=100_000 if args.quick else 2_000_000), encoding="utf-8")
        chosen = [surgery for surgery in surgeries(6, 512) if re.search(args.only, surgery.name)]
        with progress("training", 1 + len(chosen)) as tick:
            where = ["--text", str(text), "-o", str(trained)]
            first = report_of("train", "llama-tiny", *base, *where, "--minutes", str(train), "--sample=0")
            tick()
            rows = []
            for surgery in chosen:
                rows.append(grafted(trained, text, surgery, heal, Path(place) / "grafted"))
                tick()
    different = [row["name"] for row in rows if row["logits"] is not None and row["logits"] > MAX_DIFFERENCE]
    if args.json:
        settings = {"train_minutes": train, "heal_minutes": heal, "parameters": first["parameters"], "steps": first["steps"]}
        holds = not different and any(row["logits"] is not None for row in rows)
        print(json.dumps({"rows": rows, "holds": holds, "settings": settings, "versions": versions()}, ensure_ascii=False))
    else:
        show(rows)
    if different:
        raise SystemExit(f"logits of transformers differ by more than {MAX_DIFFERENCE:g}: {', '.join(different)}")


if __name__ == "__main__":
    main()
