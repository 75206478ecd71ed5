"""One run per verb that works, in an order in which later ones read what earlier ones wrote, and the files that they read.

`serve` is ended when it is ready. Tests of the wheel and of the working directory share this table.
"""

from __future__ import annotations

import json
from pathlib import Path

SMALL = ["--set=width=28", "--set=vocab=290", "--set=layers.*.mixer.heads=2", "--set=layers.*.mixer.kv_heads=1"]
STEPS = ["--batch=4", "--length=16", "--steps=3"]
RUNS: dict[str, list[str]] = {
    "doctor": [],
    "completion": ["bash"],
    "parts": ["--group", "norm"],
    "port": ["--json"],
    "recipes": [],
    "recipes copy": ["induction", "--json"],
    "learn": ["--json"],
    "learn check": ["scaled_dot_products.2", "8"],
    "show": ["llama-tiny", "--html", "show.html"],
    "diff": ["llama-tiny", "llama-tiny", "--swap", "position=alibi"],
    "match": ["llama-tiny", "llama-tiny", "--swap", "position=alibi", "--params"],
    "can-serve": ["llama-tiny"],
    "plan": ["llama-tiny", "--serve"],
    "emit": ["llama-tiny", "-o", "llama.py"],
    "train": ["llama-tiny", "--text", "notes.txt", *SMALL, *STEPS, "--sample=0", "-o", "model"],
    "runs": ["model"],
    "lab": ["lab.yaml", "--workers=1"],
    "scaling": ["sizes.csv", "--flops=1e10", "--samples=2"],
    "data build": ["notes.txt", "more.txt", "--lines", "--workers=2", "--tokenizer", "model", "-o", "tokens"],
    "data show": ["tokens", "--verify"],
    "generate": ["model", "It was", "--max-tokens", "3"],
    "tune": [
        "model",
        "--data",
        "chats.jsonl",
        "--template",
        "plain",
        "--adapter",
        "lora",
        *STEPS[:1],
        "--length=128",
        "--steps=3",
        "-o",
        "tuned",
    ],
    "merge": ["tuned", "-o", "merged"],
    "chat": ["model", "--max-tokens=3"],
    "quantize": ["model", "--bits", "8", "-o", "quantized"],
    "export": ["model", "-o", "exported"],
    "import": ["exported", "-o", "imported"],
    "verify": ["model", "imported"],
    "record": ["transformers", "exported", "-o", "dump", "--steps", "1"],
    "graft": ["model", "--set=layers.*.mixer.position=alibi", "-o", "grafted"],
    "laws": ["llama-tiny", "--only", "sharded", *SMALL],
    "tiny": ["model", "-o", "tiny"],
    "look": ["model", "--text", "notes.txt", "--html", "look.html"],
    "probe": ["model", "--task=needle", "--lengths", "16", "--depths", "0", "1", "--rows=2", "--text", "notes.txt"],
    "map": ["model", "It was", "-o", "map.png"],
    "serve": ["model", "--port=0", "--json"],
}
LAB = """
base: {width: 12, vocab: 270, layers: [{repeat: 1, mixer: {heads: 2, kv_heads: 2, head: 6}, ffn: {hidden: 16}}]}
arms: {alibi: {swap: {position: alibi}}}
data: {text: notes.txt}
train: {batch: 2, length: 16}
budget: {steps: 2}
seeds: {at_least: 2, at_most: 2}
"""
STDIN = "why?\n"  # of chat
CODES = {"chat": 4}  # the model has no chat template


def write_inputs(folder: Path) -> None:
    """Write the files that the runs read."""
    text = "It was the best of times, it was the worst of times.\n"
    (folder / "notes.txt").write_text(text * 60)
    (folder / "more.txt").write_text(text * 60)
    turns = [{"role": "user", "content": "why?"}, {"role": "assistant", "content": "it was"}]
    (folder / "lab.yaml").write_text(LAB)
    sizes = [f"{n},{d},{1.5 + 4 * n**-0.3 + 9 * d**-0.3}" for n in (1e3, 1e4, 1e5) for d in (1e4, 1e5, 1e6)]
    (folder / "sizes.csv").write_text("\n".join(["parameters,tokens,loss", *sizes]))
    (folder / "chats.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 8)
