"""The kinds of programs, by name. A kind is imported when it is run: the tests of one need not import the others."""

from __future__ import annotations

from importlib import import_module

from checks.programs.frame import Kind

KINDS = {  # name -> module and class
    "engine": ("checks.programs.engine", "EngineKind"),
    "model": ("checks.programs.model", "ModelKind"),
    "tokenizer": ("checks.programs.tokenizer", "TokenizerKind"),
    "loader": ("checks.programs.loader", "LoaderKind"),
}


def kind_of(name: str) -> Kind:
    """The kind of a name."""
    if name not in KINDS:
        raise SystemExit(f"--kinds: {name!r} is unknown; the kinds are {', '.join(KINDS)}")
    module, attribute = KINDS[name]
    return getattr(import_module(module), attribute)()
