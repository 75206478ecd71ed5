"""The files that the commands of the pages name: texts, tiny models with a tokenizer and a chat template, rows, run files.

    make("Qwen3-0.6B", folder)      writes folder/Qwen3-0.6B; KeyError for a name that nobody makes

All are made here, by code of the library, with fixed seeds; models have random weights and a few hundred tokens.
"""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch

import dovetail as dt
from dovetail.decoding.generation import Vocabulary
from dovetail.hf.write import export_directory
from dovetail.text.learn import learn
from dovetail.text.tokenizer import END, Tokenizer

ROOT = Path(__file__).resolve().parents[1]
KINDS = ("PER", "LOC", "ORG", "MISC")
WORDS = "user: What is it? assistant: It is blue, red, green. Once upon a time, say yes or no: 0 1 2 3 4 5 6 7 8 9\n" * 20
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
TINY = """
width: 32
vocab: 300
layers: [{repeat: 2, mixer: {heads: 2, kv_heads: 1, head: 16}, ffn: {hidden: 64}}]
head: {kind: lm, tied: false}
"""
MIXED = TINY.replace(
    "repeat: 2, mixer: {heads: 2, kv_heads: 1, head: 16}", "repeat: 2, mixer: {heads: 2, head: 32, position: alibi}"
)
OFFSET = TINY.replace("head: 16}", "head: 16, position: {kind: offset, start: 0.2}}")
RUN = """spec: llama-tiny
text: notes.txt
steps: 6
batch: 4
length: 32
sample: 0
set: [width=64, vocab=300, 'layers.*.mixer.head=8']
"""
LAB = {
    "base": {"width": 16, "vocab": 280, "layers": [{"repeat": 2, "mixer": {"heads": 2}, "ffn": {"hidden": 32}}]},
    "arms": {"gqa": {"set": {"layers.*.mixer.kv_heads": 1}}, "muon": {"train": {"optimizer": "muon"}}},
    "match": "params",
    "data": {"text": "plays.txt"},
    "train": {"batch": 2, "length": 32},
    "budget": {"steps": 4},
    "tune": {"learning_rate": [1e-3, 1e-2], "trials": 2},
    "seeds": {"at_least": 2, "at_most": 3},
    "smallest": 0.02,
}
LADDER = {
    "match": None, "arms": {}, "tune": None, "sizes": ["20k", "40k", "80k", "160k"], "seeds": {"at_least": 2, "at_most": 2},
    "budget": {"tokens": [256, 512, 1024]},
}  # fmt: skip
PACKAGE = """import torch
from torch import nn


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(62, 28), nn.Linear(28, 62)

    def forward(self, ids):
        x = self.table(ids).cumsum(1) / torch.arange(1, ids.shape[1] + 1)[:, None]
        return self.head(x.tanh())


def tiny():
    return Tiny()
"""
MINE = """def load():
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained("original")
"""
RING = """
import dovetail as dt
import torch
import torch.distributed as dist
from dovetail.parallel.context import piece, split_ctx

dist.init_process_group("gloo")
group = dist.group.WORLD
model = dt.build(dt.load_spec("llama-tiny").set("width", 32).set("vocab", 64).set("layers.*.mixer.head", 8))
ids = torch.arange(16)[None]
layout = dt.TokenLayout.whole(1, 16)
"""


@functools.cache
def tokenizer() -> Tokenizer:
    """A byte-pair tokenizer of 300 tokens."""
    return learn(WORDS, 300)


def model(path: Path, text: str = TINY, seed: int = 0) -> None:
    """Write a model of a spec or of a preset, with random weights, its tokenizer and a chat template, in our layout."""
    spec = dt.from_yaml(text) if "\n" in text else dt.load_spec(text)
    built = dt.build(spec.set("vocab", tokenizer().size), seed=seed)
    built.vocabulary = Vocabulary(tokenizer=tokenizer(), stop=frozenset([tokenizer().id_of(END)]))
    dt.save(built, path)
    (path / "chat_template.jinja").write_text(TEMPLATE)


def ported(path: Path, text: str = TINY, seed: int = 0) -> None:
    """Write the same in Hugging Face layout."""
    ours = path.parent / f".{path.name}"
    model(ours, text, seed)
    export_directory(ours, path)
    if not (path / "chat_template.jinja").exists():
        shutil.copy(ours / "chat_template.jinja", path)
    shutil.rmtree(ours)


def trained(path: Path) -> None:
    """Write a run of llama-tiny, of few steps: the directory that `dovetail train llama-tiny` writes."""
    text = path.parent / ".text"
    text.write_text(WORDS)
    dt.train("llama-tiny", str(text), steps=4, batch=2, length=32, sample=0, out=path, quiet=True)


def run_1(path: Path) -> None:
    """Write a run of 1,200 steps of a very small model."""
    text, small = path.parent / ".text", ["width=16", "vocab=280", "layers.*.mixer.head=4", "layers.*.ffn.hidden=16"]
    text.write_text(WORDS)
    dt.train("llama-tiny", str(text), steps=1200, batch=2, length=8, sample=0, out=path, quiet=True, set=small)


def corpus(path: Path) -> None:
    """Write token shards with their tokenizer."""
    text = path.parent / f"{path.name}.txt"
    text.write_text(prose()[:40_000])
    dt.build_data([str(text)], tokenizer="bytes", held_out=0.1, lines=True, workers=1, out=path)


def adapter(path: Path) -> None:
    """Write a LoRA adapter of the model `base` in the folder."""
    base = path.parents[1] / "base"
    data = path.parents[1] / ".chats.jsonl"
    chats(data)
    path.parent.mkdir(exist_ok=True)
    options: dict[str, Any] = {"adapter": "lora", "steps": 2, "length": 64, "out": path, "quiet": True}
    dt.tune(base, data, "sft", **options)


def prose() -> str:
    """The help topics of Python, the first 150,000 characters."""
    return "\n\n".join(topics.values())[:150_000]


def rows(path: Path, lines: list[Any]) -> None:
    """Write JSON Lines."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def chats(path: Path) -> None:
    """Write conversations of one answer."""
    colors = ("blue", "red", "green")
    turns = [(f"What is {i}?", f"It is {colors[i % 3]}.") for i in range(40)]
    rows(path, [{"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]} for q, a in turns])


def sampled(folder: Path) -> list[tuple[list[int], list[int], list[float]]]:
    """(prompt, completion, log-probs) that the model `my-model` of a folder samples."""
    sampler, samples = dt.load(folder / "my-model"), []
    generator = torch.Generator().manual_seed(0)
    for _ in range(6):
        ids = torch.randint(5, 250, (6,), generator=generator).tolist()
        out, scores = list[int](), list[float]()
        with torch.no_grad():
            for _ in range(12):
                logs = sampler(torch.tensor([ids + out]))[0, -1].log_softmax(-1)
                out.append(int(torch.multinomial(logs.exp(), 1, generator=generator)))
                scores.append(float(logs[out[-1]]))
        samples.append((ids, out, scores))
    return samples


def rollouts(path: Path) -> None:
    """Write rollouts of `my-model`, in the keys of docs/rollouts.md."""
    rows(path, [{"prompt_ids": p, "completion_ids": c, "logprobs": s} for p, c, s in sampled(path.parent)])


def nemo(path: Path) -> None:
    """Write the same in the keys of NeMo-RL."""
    keys = ("token_ids", "token_loss_mask", "generation_logprobs")
    lines = [(p + c, [0] * len(p) + [1] * len(c), [0.0] * len(p) + s) for p, c, s in sampled(path.parent)]
    rows(path, [dict(zip(keys, line, strict=True)) for line in lines])


def dump(path: Path) -> None:
    """Write a dump of `my-model` by transformers, in place of one by mlx-lm."""
    dt.record("transformers", str(path.parent / "my-model"), out=path)


def installed(path: Path) -> None:
    """Write site-packages in which the package of docs/parts.md is installed."""
    package = ROOT / "tests" / "outside" / "offset_position"
    shutil.copytree(package / "src", path)
    info = path / "offset_position-0.0.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: offset-position\nVersion: 0.0.0\n")
    names = "offset = offset_position\noffset-oracle = offset_position.oracle\n"
    (info / "entry_points.txt").write_text(f"[dovetail.parts]\n{names}")


def lab_runs(path: Path) -> None:
    """Write the runs of a ladder of four sizes, each at three budgets."""
    text(prose)(path.parent / "plays.txt")
    given = {**LAB, **LADDER, "data": {"text": str(path.parent / "plays.txt")}}
    dt.lab({key: value for key, value in given.items() if value is not None}, out=path.parent)


def muon(path: Path) -> None:
    """Write the lab of docs/labs with its base, for 2,000 tokens and three seeds."""
    shutil.copy(ROOT / "docs" / "labs" / "base.yaml", path.parent)
    whole = (ROOT / "docs" / "labs" / path.name).read_text(encoding="utf-8")
    changes = (
        ("tokens: 300k", "tokens: 2k"),
        ("trials: 5", "trials: 2"),
        ("at_least: 10, at_most: 20", "at_least: 2, at_most: 3"),
    )
    for old, new in changes:
        assert whole.count(old) == 1, f"{path.name} has no {old}"
        whole = whole.replace(old, new)
    path.write_text(whole, encoding="utf-8")


def package(path: Path) -> None:
    """Write the package that docs/ci.md names."""
    path.mkdir()
    (path / "__init__.py").write_text("")
    (path / "models.py").write_text(PACKAGE)


def text(content: str | Callable[[], str]) -> Callable[[Path], None]:
    """A maker of a file with a content."""
    return lambda path: discard(path.write_text(content if isinstance(content, str) else content(), encoding="utf-8"))


def discard(_: object) -> None:
    """Return nothing, for makers that are expressions."""


def example(path: Path) -> None:
    """Copy a file of docs/examples."""
    shutil.copy(ROOT / "docs" / "examples" / path.name, path)


MAKERS: dict[str, Callable[[Path], None]] = {
    "plays.txt": text(prose),
    "notes.txt": text(prose),
    "novel.txt": text(prose),
    "lab.yaml": text(json.dumps(LAB)),
    "lab/runs": lab_runs,
    "docs/labs/muon.yaml": muon,
    "Qwen3-0.6B": lambda path: ported(path, "qwen3-tiny"),
    "my-model": ported,
    "original": ported,
    "path/to/model": ported,
    "small": model,
    "base": model,
    "mixed": lambda path: model(path, MIXED),
    "step-100": lambda path: model(path, seed=1),
    "step-110": lambda path: model(path, seed=2),
    "llama-tiny-trained": trained,
    "run-1": run_1,
    "bert-base-uncased": lambda path: ported(path, "bert-tiny"),
    "entities.jsonl": lambda path: rows(
        path, [{"tokens": ["What", "is", "it", "?"], "tags": ["O", f"B-{kind}", f"I-{kind}", "O"]} for kind in KINDS * 8]
    ),
    "stories": corpus,
    "letters": corpus,
    "adapters/legal": adapter,
    "keys.txt": text("a-key-of-thirty-two-characters-00\n"),
    "admin.txt": text("an-admin-key-of-thirty-two-chars\n"),
    "chats.jsonl": chats,
    "pairs.jsonl": lambda path: rows(
        path, [{"prompt": f"What is {i}?", "chosen": " It is blue.", "rejected": " It is red."} for i in range(40)]
    ),
    "sums.jsonl": lambda path: rows(
        path, [{"prompt": f"{i % 5} + {i // 8} =", "answer": str(i % 5 + i // 8)} for i in range(40)]
    ),
    "rollouts.jsonl": rollouts,
    "train_data_step12.jsonl": nemo,
    "run.yaml": text(RUN),
    "tiny.yaml": text(TINY),
    "my-spec.yaml": text(OFFSET),
    "ema.py": example,
    "ema.yaml": example,
    "mine.py": text(MINE),
    "ring.py": text(RING),
    "my_model.py": lambda path: discard(dt.emit(path.parent / "my-model", out=path)),
    "dump": dump,
    "installed": installed,
    "package": package,
}


def make(name: str, folder: Path) -> None:
    """Write a fixture into a folder."""
    maker = MAKERS[name]
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    maker(path)
