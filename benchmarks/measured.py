"""The files that a command of the repository can run, found by reading their imports; nothing is executed.

    measured("python benchmarks/serve.py --json")   measured("dovetail laws --json")   measured("python -m checks.mutants")

From the script, or from the module of the verb, every import is followed, those inside functions included and those under
TYPE_CHECKING left out. Further edges:

- a public name that a package resolves when it is first used (a table of names and modules beside `__getattr__`): only the
  modules of names that are used, `from dovetail import build` or `dt.build`;
- a string that is the name of a module (`-m`, `import_module`), the name of a Python file, or a folder beside the file that
  names it: workers, recorders, child processes;
- an import by a computed name, f"{__name__}.{file}" or f"dovetail.cli.{verb}": all modules with that prefix; for a command
  line, those whose verb is a word in a script that starts it, if there is one;
- the modules that pyproject.toml registers under an entry point that is named; data files beside the modules of a package.
"""

from __future__ import annotations

import ast
import dataclasses as dc
import itertools
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = "benchmarks"
STARTED = "__main__"  # of a module that a string names: it may be run
DATA = (".yaml", ".json", ".jinja", ".html", ".css", ".js")
MODULE, FOLDER, FILE = re.compile(r"[a-z_]\w*(\.\w+)*"), re.compile(r"\w+(/\w+)*"), re.compile(r"[\w/]*[a-z0-9]\.py")


@dc.dataclass(frozen=True)
class Source:
    """What one file names. `modules`: (module, name imported from it, or None)."""

    modules: frozenset[tuple[str, str | None]]
    prefixes: frozenset[str]  # of modules that are imported by a computed name
    files: frozenset[str]  # names of Python files
    folders: frozenset[str]  # strings in a file that mentions `__file__`
    words: frozenset[str]  # words of its strings, if it starts a command line; empty otherwise
    groups: frozenset[str]  # of entry points


def measured(command: str, root: Path = ROOT) -> list[Path]:
    """The files that the command can run, sorted."""
    return Closure(root).of(command)


class Closure:
    """The files of a checkout by module name, and the walk over their imports."""

    def __init__(self, root: Path) -> None:
        self.root = root
        project = root / "pyproject.toml"
        self.project = tomllib.loads(project.read_text(encoding="utf-8"))["project"] if project.is_file() else {}
        self.modules: dict[str, Path] = {}
        self.sources: dict[Path, Source] = {}
        self.edges: dict[Path, set[Path]] = {}
        self.lazy: dict[Path, dict[str, str]] = {}
        for folder, below in (("src", "src"), (SCRIPTS, SCRIPTS), ("checks", ""), ("recipes", "")):
            for path in sorted((root / folder).rglob("*.py")):
                names = path.relative_to(root / below).with_suffix("").parts
                name = ".".join(names[:-1] if names[-1] == "__init__" else names)
                self.modules[name] = path
        self.names = {path: name for name, path in self.modules.items()}

    def of(self, command: str) -> list[Path]:
        """The files that the command can run, sorted. SystemExit if nothing in the checkout is its script."""
        program, *arguments = shlex.split(command)
        if program == "python" and arguments[0].endswith(".py"):
            begin = [self.root / arguments[0]]
        elif program == "python" and arguments[0] == "-m":
            begin = [*self._module(arguments[1], None), *self._module(f"{arguments[1]}.{STARTED}", None)]
        else:
            begin = [path for name in self._entry(program) for path in self._module(name, None)]
        named = [word for word in arguments if "." in word and word in self.modules]  # --load checks.oracles
        begin += [path for name in named for path in self._module(name, None)]
        if not begin or not all(path.is_file() for path in begin):
            raise SystemExit(f"{command}: neither a script nor a program of pyproject.toml")
        reached, words, prefixes = set[Path](), set(() if program == "python" else arguments), set[tuple[str, bool]]()
        pending = {*begin}
        while pending:
            reached |= pending
            code = [path for path in pending if path.suffix == ".py"]
            words |= {word for path in code for word in self._source(path).words}
            prefixes |= {(prefix, self._runs_verbs(path)) for path in code for prefix in self._source(path).prefixes}
            pending = {one for path in code for one in self._edges(path)} - reached
            if not pending:  # the verbs of a command line are known when all scripts have been read
                pending = self._below(prefixes, words) - reached
        return sorted(reached)

    def _edges(self, path: Path) -> set[Path]:
        if path not in self.edges:
            self.edges[path] = {*self._named(path, self._source(path))}
        return self.edges[path]

    def _source(self, path: Path) -> Source:
        if path not in self.sources:
            tree = ast.parse(path.read_bytes())
            self.lazy[path] = _lazy(tree)
            self.sources[path] = _read(tree, self.names[path], path.name == "__init__.py", {*self.lazy[path].values()})
        return self.sources[path]

    def _entry(self, program: str) -> Iterator[str]:
        if target := self.project.get("scripts", {}).get(program):
            yield target.partition(":")[0]

    def _named(self, path: Path, source: Source) -> Iterator[Path]:
        """The files that a file names."""
        for module, attribute in source.modules:
            if attribute != STARTED or module in self.modules:
                yield from self._module(module, attribute)
        named = [one for one in self.names for text in source.files if one.as_posix().endswith(f"/{text}")]
        yield from named
        for folder in source.folders:
            inside = path.parent / folder
            if FOLDER.fullmatch(folder) and inside.is_dir():
                if not any(
                    (inside / name).is_file() for name in source.folders if FILE.fullmatch(name) or FOLDER.fullmatch(name)
                ):
                    yield from inside.glob("*.py")  # no file of it is named
        for group in source.groups:
            for target in self.project.get("entry-points", {}).get(group, {}).values():
                yield from self._module(target.partition(":")[0], None)

    def _module(self, module: str, attribute: str | None) -> Iterator[Path]:
        """The file of a module, those of its packages with their data, and the module behind a public name."""
        parts = module.split(".")
        for i in range(1, len(parts) + 1):
            path = self.modules.get(".".join(parts[:i]))
            if path is None:
                return
            yield path
            if path.name == "__init__.py":
                yield from (one for one in path.parent.iterdir() if one.suffix in DATA)
        if attribute is None:
            return
        if f"{module}.{attribute}" in self.modules:
            yield from self._module(f"{module}.{attribute}", None)
            return
        self._source(self.modules[module])
        if target := self.lazy[self.modules[module]].get(attribute):
            yield from self._module(target, attribute)

    def _runs_verbs(self, path: Path) -> bool:
        """Whether a file is part of a program, so that the modules it imports by a computed name are those of its verbs."""
        programs = {target.partition(":")[0] for target in self.project.get("scripts", {}).values()}
        return any(self.names[path] == program or self.names[path].startswith(f"{program}.") for program in programs)

    def _below(self, prefixes: set[tuple[str, bool]], words: set[str]) -> set[Path]:
        """The modules with a prefix; of the verbs of a program, those that are named, if there is one."""
        found: dict[bool, dict[str, Path]] = {True: {}, False: {}}
        for prefix, verbs in prefixes:
            found[verbs] |= {name: path for name, path in self.modules.items() if name.startswith(prefix)}
        said = {word.replace("-", "_") for word in words}
        ends = {path: name.rpartition(".")[2].rstrip("_") for name, path in found[True].items()}
        named = {path for path, end in ends.items() if end in said or {*end.split("_")} <= said}
        return {*found[False].values()} | (named or {*found[True].values()})


def _lazy(tree: ast.Module) -> dict[str, str]:
    """The table of a module that resolves names when they are first used: name -> module."""
    if not any(isinstance(node, ast.FunctionDef) and node.name == "__getattr__" for node in tree.body):
        return {}
    return {
        str(key.value): str(value.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)
        for key, value in zip(node.value.keys, node.value.values, strict=True)
        if isinstance(key, ast.Constant) and isinstance(value, ast.Constant)
    }


def _read(tree: ast.Module, name: str, is_package: bool, lazy: set[str]) -> Source:
    """Read what a file names; `lazy` are the modules of its table of public names."""
    package = name if is_package else name.rpartition(".")[0]
    nodes = [*_run(tree)]
    modules, prefixes, aliases = set[tuple[str, str | None]](), set[str](), dict[str, str]()
    for node in nodes:
        if isinstance(node, ast.Import):
            modules |= {(one.name, None) for one in node.names}
            aliases |= {one.asname or one.name: one.name for one in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: package.count(".") + 2 - node.level]
                base = ".".join([*above, *([base] if base else [])])
            modules |= {(base, one.name) for one in node.names}
            aliases |= {one.asname or one.name: f"{base}.{one.name}" for one in node.names}
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in aliases:
            modules.add((aliases[node.value.id], node.attr))
        elif isinstance(node, ast.JoinedStr) and (prefix := _prefix(node, name, package, aliases)):
            prefixes.add(prefix)
    texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)} - lazy
    words = {word for text in texts for word in text.split()}
    named = {text for text in texts if "." in text} | {*_started(nodes)}
    return Source(
        modules=frozenset(modules | {(text, STARTED) for text in named if MODULE.fullmatch(text)}),
        prefixes=frozenset(prefixes),
        files=frozenset(text for text in texts if FILE.fullmatch(text)),
        folders=frozenset(texts if any(isinstance(node, ast.Name) and node.id == "__file__" for node in nodes) else ()),
        words=frozenset(words if "-m" in words else ()),
        groups=frozenset(texts),
    )


def _run(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node that can run: none under TYPE_CHECKING, no docstring."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from (part for other in node.orelse for part in (other, *_run(other)))
            continue
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        yield node
        yield from _run(node)


def _started(nodes: list[ast.AST]) -> Iterator[str]:
    """The words that follow "-m" in a command line: a list of strings, or one string."""
    for node in nodes:
        if isinstance(node, ast.List | ast.Tuple | ast.JoinedStr):
            texts = [
                one.value if isinstance(one, ast.Constant) else None
                for one in (node.values if isinstance(node, ast.JoinedStr) else node.elts)
            ]
        elif isinstance(node, ast.Constant):
            texts = [node.value]
        else:
            continue
        words = [word for text in texts for word in (text.split() if isinstance(text, str) else [""])]
        yield from (second for first, second in itertools.pairwise(words) if first == "-m")


def _prefix(node: ast.JoinedStr, name: str, package: str, aliases: dict[str, str]) -> str:
    """The constant start of f"{__name__}.{x}", f"{__package__}.{x}", f"{module.__name__}.{x}" or f"a.b.{x}", "" of others."""
    start = ""
    for part in node.values[:-1]:
        if isinstance(part, ast.Constant):
            start += str(part.value)
        elif isinstance(part, ast.FormattedValue):
            written = ast.unparse(part.value)
            known = {"__name__": name, "__package__": package}
            known |= {f"{alias}.__name__": target for alias, target in aliases.items()}
            if written not in known:
                return ""
            start += known[written]
    return start if start.endswith(".") and isinstance(node.values[-1], ast.FormattedValue) else ""
