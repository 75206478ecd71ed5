"""Reference pages generated from the code at every build: parts, commands, families, presets, seeded bugs, engines."""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import os
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from figures import standings
from markdown_table import table
from results_page import results

import dovetail
from dovetail.api.list_parts import list_parts
from dovetail.cli import VERBS, main
from dovetail.core.errors import SpecError
from dovetail.core.fold import parameters
from dovetail.core.group import GROUPS, Mask, Mixer, Position
from dovetail.core.part import KINDS
from dovetail.io.spec import from_mapping, load_spec, zoo
from dovetail.lawbook.seeded.run import areas
from dovetail.port.survey import REFERENCE_VERSION, survey

COLOURS = re.compile(r"\x1b\[[0-9;]*m")
WIDTH = "92"  # columns of a command's help


def write_reference(place: Path) -> None:
    """Write every page; one that has not changed is left alone, so that a second build is short."""
    place.mkdir(exist_ok=True)
    pages = {
        "python": python,
        "parts": parts,
        "commands": commands,
        "families": families,
        "presets": presets,
        "seeded": seeded,
        "layouts": layouts,
        "engines": engines,
        "results": results,
    }
    texts = {f"{name}.md": "\n".join(page()) + "\n" for name, page in pages.items()}
    for name, text in {**texts, "rooms.svg": rooms(place.parent.parent / "pyproject.toml")}.items():
        file = place / name
        if not file.exists() or file.read_text(encoding="utf-8") != text:
            file.write_text(text, encoding="utf-8")


def python() -> Iterator[str]:
    """Every public name: its signature and its documentation; of a model, the methods that people call."""
    yield "# Python names\n"
    yield "`import dovetail as dt`; what they are for: [](../python.md). Classes of parts are in `dt.parts`: [](parts.md).\n"
    methods = [dovetail.Transformer.__call__, *(getattr(dovetail.Transformer, name) for name in ("loss", "generate", "trace"))]
    public = {name: getattr(dovetail, name) for name in dir(dovetail) if not name.startswith("_")}
    yield from _documented("Functions", {f"dt.{k}": v for k, v in public.items() if inspect.isfunction(v)})
    yield from _documented("A built model", {f"model.{m.__name__}": m for m in methods if m.__name__ != "_wrapped_call_impl"})
    yield from _documented("Classes", {f"dt.{k}": v for k, v in public.items() if inspect.isclass(v)})


def _documented(title: str, names: dict[str, Any]) -> Iterator[str]:
    yield f"## {title}\n"
    for name, value in names.items():
        signature = "" if inspect.isclass(value) else str(inspect.signature(value)).replace("(self, ", "(")
        yield f"### {name}\n\n```text\n{name}{signature}\n```\n\n{inspect.cleandoc(value.__doc__ or '')}\n"


def layouts() -> Iterator[str]:
    """Every part in every layout: it trains as one rank does, or is refused."""
    yield "# Parts and layouts\n"
    yield "Whether a part trains over two ranks as on one, in sampled specs (law 8, float64), or is refused with its path,"
    yield "before anything is allocated. *Other part*: every sampled spec with it was refused for another part. Models with an"
    yield "encoder are not among them. Taken by `python benchmarks/layouts.py --json`.\n"
    found = next((one.result for one in standings() if one.name == "layouts"), None)
    cells = found.get("table", {}) if isinstance(found, dict) else {}
    ways = list(next(iter(cells.values()), {}))
    yield from table(("part", *ways), [(f"`{kind}`", *(row[way] or "–" for way in ways)) for kind, row in cells.items()])


def engines() -> Iterator[str]:
    """Every mixer, position and mask in each engine: served, or the reason why not."""
    yield "# Parts and engines\n"
    yield "The result of `dt.can_serve` for a decoder with the part at its defaults, heads of 32. *vllm* is the plugin in vLLM;"
    yield "the native engine serves parts that it does not support. Parts of the other groups run in both unchanged."
    yield "How to serve with vLLM: [](../serve.md).\n"
    rows: list[tuple[str, ...]] = []
    for group in (Mixer, Position, Mask):
        for kind in sorted(kind for kind, cls in KINDS.items() if issubclass(cls, group)):
            rows.append((f"`{kind}`", group.group, *(_served(kind, engine) for engine in ("native", "vllm"))))
    yield from table(("part", "group", "native", "vllm"), rows)


def _served(kind: str, engine: str) -> str:
    """Whether an engine serves a decoder with this part."""
    part, spec = KINDS[kind], from_mapping({"layers": [{}]})
    try:
        if issubclass(part, Mask):
            kinds = ["causal", kind]
            joined = {"any": kinds} if part.joins == "any" else kinds
            reasons = dovetail.can_serve(spec.set("layers.*.mixer.mask", joined), engine)
        else:
            reasons = dovetail.can_serve(spec.swap(part.group, kind), engine)
    except SpecError as error:
        return f"not by itself in a decoder ({error.problem})"
    return reasons[0].problem if reasons else "yes"


def parts() -> Iterator[str]:
    """Every part: what it does, its fields, and the equation its file opens with."""
    yield "# Parts\n"
    count = len(list_parts())
    yield f"{count} parts in {len(GROUPS)} groups. A part of yours joins them by an entry point: [](../parts.md).\n"
    yield "Most of the equations in mathematical notation: [](../equations.md).\n"
    for group in GROUPS:
        yield f"## {group.group}\n\n{inspect.cleandoc(group.__doc__ or '')}\n"
        for part in list_parts(group.group):
            yield f"### {part.kind}\n\n{part.summary}\n"
            if part.fields:
                rows = [(field.name, field.type, json.dumps(field.default)) for field in part.fields]
                yield from table(("field", "type", "default"), [tuple(f"`{cell}`" for cell in row) for row in rows])
            yield f"```text\n{inspect.cleandoc(sys.modules[KINDS[part.kind].__module__].__doc__ or '')}\n```\n"


def commands() -> Iterator[str]:
    """Every verb with its own help."""
    yield "# Commands\n"
    yield "Results go to stdout, progress to stderr; `--json` is for machines.\n"
    yield "Exit codes: 1 a law or a comparison fails, 2 usage, 3 spec, 4 data or file, 5 diverged.\n"
    yield from table(
        ("verb", "what it does"),
        [(f"[`dovetail {verb}`](#dovetail-{verb.replace(' ', '-')})", text) for verb, text in VERBS.items()],
    )
    for verb in VERBS:
        yield f"## dovetail {verb}\n\n```text\n{_help(verb)}\n```\n"


def _help(verb: str) -> str:
    """What `dovetail VERB --help` prints."""
    printed = io.StringIO()
    os.environ |= {"COLUMNS": WIDTH, "NO_COLOR": "1"}
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        main([*verb.split(), "--help"])
    return COLOURS.sub("", printed.getvalue()).strip()


def families() -> Iterator[str]:
    """The families of elsewhere."""
    yield f"# Families\n\nRead and written, bit for bit; compared with transformers {REFERENCE_VERSION}.\n"
    yield "How to add one: [](../port.md).\n"
    rows = [(f"`{f.model_type}`", ", ".join(f"`{name}`" for name in f.architectures), str(f.lines)) for f in survey()]
    yield from table(("model type", "classes", "lines of its dialect"), rows)


def presets() -> Iterator[str]:
    """The zoo, with what each model costs."""
    yield "# Presets\n\n`dovetail show NAME` prints the tree and the cost of each.\n"
    rows = []
    for name in zoo():
        first = (resources.files("dovetail.zoo") / f"{name}.yaml").read_text(encoding="utf-8").splitlines()[0]
        rows.append((f"`{name}`", f"{parameters(load_spec(name)):,}", first.removeprefix("# ")))
    yield from table(("preset", "parameters", "what it is"), rows)


def seeded() -> Iterator[str]:
    """Every seeded bug: the law that must fail, the file that seeds it, the public report."""
    rows = [(bug, area) for area, bugs in areas().items() for bug in bugs]
    reported = sum(bool(bug.report) for bug, _ in rows)
    yield "# Seeded bugs\n"
    yield f"{len(rows)} bugs, {reported} of them after a public report. `dovetail laws --mutants` seeds them one at a time:"
    yield "the law must hold without the bug and fail with it. How the laws are tested: [](../laws.md).\n"
    cells = [(bug.name, f"`{bug.law}`", f"`lawbook/seeded/{area}.py`", bug.report) for bug, area in rows]
    yield from table(("bug", "law", "file", "report"), cells)


def rooms(project: Path) -> str:
    """A drawing of the rooms, lower ones never importing higher ones: the layers of the import linter."""
    (layers,) = (c["layers"] for c in _contracts(project) if c["type"] == "layers")
    row, width, room = 58, 900, 120
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {row * len(layers)}" role="img">']
    lines.append("<style>rect{fill:#eef3fb;stroke:#4477aa}text{font:15px monospace;text-anchor:middle}</style>")
    for i, layer in enumerate(layers):
        names = [name.strip().removeprefix("dovetail.") for name in layer.split("|")]
        for j, name in enumerate(names):
            x = width / 2 + (j - (len(names) - 1) / 2) * (room + 16)
            lines.append(f'<rect x="{x - room / 2:g}" y="{row * i + 8}" width="{room}" height="38" rx="7"/>')
            lines.append(f'<text x="{x:g}" y="{row * i + 32}">{name}</text>')
    return "\n".join([*lines, "</svg>\n"])


def _contracts(project: Path) -> list[dict[str, Any]]:
    return tomllib.loads(project.read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]
