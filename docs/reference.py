"""Reference pages generated from the code at every build: parts, commands, families, presets, seeded bugs, engines."""

from __future__ import annotations

import ast
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

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from figures import standings
from markdown_table import table
from results_page import results

import dovetail
from checks.mutants.run import areas
from dovetail.api.list_parts import list_parts
from dovetail.base.errors import SpecError
from dovetail.base.option import declared
from dovetail.cli import VERBS, main
from dovetail.files.spec import from_mapping, load_spec, zoo
from dovetail.hf.survey import REFERENCE_VERSION, survey
from dovetail.nn.groups import GROUPS, Mask, Mixer, Position
from dovetail.spec.fold import parameters
from dovetail.spec.part import KINDS

COLOURS = re.compile(r"\x1b\[[0-9;]*m")
WIDTH = "92"  # columns of a command's help
PROJECT, SOURCE = Path(__file__).parents[1] / "pyproject.toml", Path(dovetail.__file__).parent


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
        "rooms": rooms,
    }
    texts = {f"{name}.md": "\n".join(page()) + "\n" for name, page in pages.items()}
    for name, text in texts.items():
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
        signature = "" if inspect.isclass(value) else str(_plain(inspect.signature(value))).replace("(self, ", "(")
        yield f"### {name}\n\n```text\n{name}{signature}\n```\n\n{inspect.cleandoc(value.__doc__ or '')}\n"
        if inspect.isfunction(value) and (options := declared(value)):
            yield from table(("option", "what it is"), [(f"`{key}`", option.option.help) for key, option in options.items()])


def _plain(signature: inspect.Signature) -> inspect.Signature:
    """The signature with types in place of `Annotated[type, Option(…)]`."""
    found = []
    for parameter in signature.parameters.values():
        written = parameter.annotation
        node = ast.parse(written, mode="eval").body if isinstance(written, str) else None
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Tuple) and ast.unparse(node.value) == "Annotated":
            written = ast.unparse(node.slice.elts[0])
        found.append(parameter.replace(annotation=written))
    return signature.replace(parameters=found)


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
        [(f"[`dovetail {name}`](#dovetail-{name.replace(' ', '-')})", verb.summary) for name, verb in VERBS.items()],
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
    yield f"{len(rows)} bugs, {reported} of them after a public report. `python -m checks.mutants` seeds them one at a time:"
    yield "the law must hold without the bug and fail with it. How the laws are tested: [](../laws.md).\n"
    cells = [(bug.name, f"`{bug.law}`", f"`checks/mutants/seeded/{area}.py`", bug.report) for bug, area in rows]
    yield from table(("bug", "law", "file", "report"), cells)


def rooms() -> Iterator[str]:
    """The rooms by floor, from the layers of the import linter; the contents are the first paragraph of their docstrings."""
    yield "# Rooms\n"
    yield "A room imports only rooms of lower floors; the import linter checks this on every change.\n"
    (layers,) = (c["layers"] for c in _contracts(PROJECT) if c["type"] == "layers" and "dovetail.base" in c["layers"])
    yield from table(("floor", "room", "contents", "lines"), _room_rows(layers))


def _room_rows(layers: list[str]) -> Iterator[tuple[str, str, str, str]]:
    for floor, layer in zip(range(len(layers), 0, -1), layers, strict=True):
        for name in (name.strip().replace(".", "/") for name in layer.split("|")):
            folder = SOURCE.parent / name
            packages = [folder, *sorted(path.parent for path in folder.glob("*/__init__.py"))] if folder.is_dir() else [folder]
            for path in packages:
                yield str(floor), f"`{path.relative_to(SOURCE)}`", _contents(path), f"{_lines(path):,}"


def _contents(path: Path) -> str:
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    first = (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").split("\n\n")[0]
    return " ".join(first.split())


def _lines(path: Path) -> int:
    files = path.rglob("*.py") if path.is_dir() else [path.with_suffix(".py")]
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def _contracts(project: Path) -> list[dict[str, Any]]:
    return tomllib.loads(project.read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]
