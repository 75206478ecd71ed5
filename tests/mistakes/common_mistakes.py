"""Make each mistake of mistakes.yaml and return the message: a command line (`dovetail …`) or a Python expression (of `dt`)."""

from __future__ import annotations

import contextlib
import io
import shlex
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
STORED = HERE / "mistakes.yaml"
FILES = {
    "text.txt": "It was the best of times, it was the worst of times.\n" * 40,
    "latin.txt": b"caf\xe9 " * 300,
    "empty.txt": "",
    "typo.yaml": "width: 28\nlayers: [{mixer: {heads: 2}}, {mixer: {headz: 2}}]\n",
    "broken.yaml": "width: 28\nlayers: [\n",
    "run.yaml": "run: 1\nspec: llama-tiny\ntext: text.txt\nstpes: 3\n",
    "run-type.yaml": "run: 1\nspec: llama-tiny\ntext: text.txt\nsteps: many\n",
    "run-bounds.yaml": "run: 1\nspec: llama-tiny\ntext: text.txt\nbatch: 0\n",
    "rows.jsonl": '{"text": "a row", "label": "good"}\n' * 8,
    "chats.jsonl": '{"messages": [{"role": "user", "content": "why?"}, {"role": "assistant", "content": "so"}]}\n' * 8,
}


def write_files(folder: Path) -> None:
    """Write the files that the mistakes name, and a model without a tokenizer."""
    import dovetail as dt

    for name, content in FILES.items():
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    sizes = {"width": 28, "vocab": 290, "layers.*.mixer.heads": 2, "layers.*.mixer.kv_heads": 1}
    spec = dt.load_spec("llama-tiny")
    for path, value in sizes.items():
        spec = spec.set(path, value)
    dt.save(dt.build(spec), folder / "model")


def stored() -> list[dict[str, str]]:
    """Return the mistakes with both messages."""
    return yaml.safe_load(STORED.read_text(encoding="utf-8"))


def message_of(mistake: str) -> str:
    """Make the mistake in the working directory; return what the user reads."""
    return _of_command(shlex.split(mistake)[1:]) if mistake.startswith("dovetail ") else _of_expression(mistake)


def _of_command(args: list[str]) -> str:
    from dovetail.cli import main

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), contextlib.suppress(SystemExit):
        main(args)
    said = [line for line in err.getvalue().splitlines() if line.startswith("dovetail: ")]
    return said[-1].removeprefix("dovetail: ") if said else "no error"


def _of_expression(expression: str) -> str:
    import dovetail as dt

    names: dict[str, Any] = {"dt": dt}
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            eval(expression, names)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "no error"
