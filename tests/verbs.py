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
    "show": ["llama-tiny", "--html", "show.html"],
    "diff": ["llama-tiny", "llama-tiny", "--swap", "position=alibi"],
    "match": ["llama-tiny", "llama-tiny", "--swap", "position=alibi", "--params"],
    "can-serve": ["llama-tiny"],
    "plan": ["llama-tiny", "--serve"],
    "emit": ["llama-tiny", "-o", "llama.py"],
    "train": ["llama-tiny", "--text", "notes.txt", *SMALL, *STEPS, "--sample=0", "-o", "model"],
    "runs": ["model"],
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
    "map": ["model", "It was", "-o", "map.png"],
    "serve": ["model", "--port=0", "--json"],
}
STDIN = "why?\n"  # of chat
CODES = {"chat": 4}  # the model has no chat template


def write_inputs(folder: Path) -> None:
    """Write the files that the runs read."""
    text = "It was the best of times, it was the worst of times.\n"
    (folder / "notes.txt").write_text(text * 60)
    (folder / "more.txt").write_text(text * 60)
    turns = [{"role": "user", "content": "why?"}, {"role": "assistant", "content": "it was"}]
    (folder / "chats.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 8)
