"""A verb as a command: the options of its functions in the api room, with those of the command line, and the run of both.

Most verbs need no code here: their flags follow from the function's signature, their help from the docstring of its module.
A verb that does more than call its function and print the result has a module in this room with a function `run`: it gets the
options that the command line gives, by name, and may declare options of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses as dc
import importlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from dovetail.api.options import OutFile, Spec
from dovetail.base.errors import UsageError
from dovetail.base.option import Option, Parameter, declared, parameters
from dovetail.cli.verbs import VERBS, Verb
from dovetail.disk.atomic import check_free

if TYPE_CHECKING:
    from dovetail.cli.printing import Printer

Options = dict[str, Any]
UNDERSCORES = str.maketrans(" -", "__")
LOAD = Option(
    "Run a Python file, or import a module, that registers parts of your own; may be given many times.",
    form="FILE.py|MODULE",
    repeat=True,
)
FORCE = Option("Replace an existing file.")
JSONL = Option("Print one JSON object per line: each result as soon as it is known, and at the end the object of --json.")


@dc.dataclass(frozen=True)
class Command:
    """A verb with its functions, its module in this room if it has one, and its options by name."""

    verb: Verb
    functions: tuple[Callable[..., Any], ...]
    module: ModuleType | None
    about: str  # the text of the help
    options: Mapping[str, Parameter]

    @property
    def takes_spec(self) -> bool:
        """Whether an option is a spec, which may be a preset's name."""
        return any(option.option.check is Spec.keywords["check"] for option in self.options.values())

    def run(self, given: Options) -> int:
        """Run the verb with the options that the command line gives; return the exit code."""
        values = {name: option.default for name, option in self.options.items() if not option.required and not option.variadic}
        values |= given
        for name, option in self.options.items():
            _check(option.option, values.get(name), values.get("force", False))
        if values.get("load"):
            from dovetail.base.extensions import load_parts

            load_parts(values["load"])
        if self.verb.out:
            model = os.path.abspath(values[next(iter(self.options))])
            out = self.verb.out.format(model, **values | {"name": os.path.basename(model)})
            given.setdefault("out", Path(os.path.relpath(out)))
        ours = {name for function in self.functions for name in declared(function)}
        if self.module is None:
            return self._call({name: value for name, value in given.items() if name in ours}, values)
        if self.verb.streams:
            values["printer"] = self._printer(values)
        own = {name: values[name] for name in parameters(self.module.run) if name in values}
        return self.module.run({name: value for name, value in given.items() if name in ours - own.keys()}, **own) or 0

    def _call(self, options: Options, values: Options) -> int:
        """Call the function, write the page and print the result."""
        (function,) = self.functions
        printer = self._printer(values)
        if self.verb.streams:
            options["watch"] = printer.event
        return printer.end(call(function, options))

    def _printer(self, values: Options) -> Printer:
        """Return what prints the result as the options say."""
        from dovetail.cli.printing import Printer

        if values["json"] and values.get("jsonl"):
            raise UsageError("--json, --jsonl: choose one")
        return Printer(values["json"], values.get("jsonl", False), values.get("html"), values.get("force", False))


def command_of(name: str) -> Command:
    """Return the command of a verb."""
    verb, stem = VERBS[name], name.translate(UNDERSCORES)
    functions = tuple(map(_function, (stem,) if verb.functions is None else verb.functions))
    own = Path(__file__).with_name(f"{stem}.py").is_file()
    module = importlib.import_module(f"dovetail.cli.{stem}") if own else None
    options: dict[str, Parameter] = {}
    for known in (ours := [declared(function) for function in functions]):
        options |= {option: parameter for option, parameter in known.items() if option not in options}
    for option, parameter in options.items():  # of one function only
        if parameter.required and not all(option in known for known in ours):
            options[option] = parameter._replace(default=None)
    options |= {} if module is None else declared(module.run)
    options.setdefault("json", Parameter("json", bool, Option(verb.json), False))
    if verb.streams:
        options["jsonl"] = Parameter("jsonl", bool, JSONL, False)
    if verb.page:
        options["html"] = Parameter("html", Path | None, OutFile(verb.page), None)
        options["force"] = Parameter("force", bool, FORCE, False)
    if verb.loads:
        options["load"] = Parameter("load", tuple[str, ...], LOAD, ())
    about = module if module is not None else importlib.import_module(functions[0].__module__)
    return Command(verb, functions, module, about.__doc__ or "", options)


def call(function: Callable[..., Any], options: Options) -> Any:
    """Call a function with options by name; its progress is shown where it reports any."""
    from dovetail.cli.output import print_note
    from dovetail.cli.printing import shown_loading
    from dovetail.views.progress import delayed_bar, step_bar

    known, options = parameters(function), dict(options)
    with contextlib.ExitStack() as stack:
        if "watch" in known and "watch" not in options:
            directory = Path(options[next(iter(known))])
            options["watch"] = stack.enter_context(shown_loading(directory.name))
        for name in ("note", "announce"):
            if name in known:
                options[name] = print_note
        if "progress" in known:
            options["progress"] = stack.enter_context(step_bar(function.__name__))
        if "on_step" in known:
            options["on_step"] = stack.enter_context(delayed_bar("{task.description}", "calibrating", counts=True))
        names = list(known)
        first = next((names[: i + 1] for i, name in enumerate(names) if known[name].variadic), [])
        args = [value for name in first for value in _values(known[name], options.pop(name, ()))]
        return function(*args, **options)


def _values(option: Parameter, value: Any) -> tuple[Any, ...]:
    return tuple(value) if option.variadic else (value,)


def _check(option: Option, value: Any, force: bool) -> None:
    """Raise for a path or the name of a spec that cannot be right."""
    if value is None:
        return
    if option.check is not None:
        option.check(value)
    if option.new:
        check_free(value, force)


def _function(name: str) -> Callable[..., Any]:
    """Return a function of the api room, whose module is called like it."""
    return getattr(importlib.import_module(f"dovetail.api.{name}"), name)
