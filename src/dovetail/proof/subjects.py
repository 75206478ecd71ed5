"""Subjects: what laws can run on, by name. A prefix (`hf:`, `py:`, `http://`) names a kind; a name without one is a spec.

A kind has a table of laws and a function that opens a subject. `dovetail.laws`, the command line and the pytest plugin take
every kind in SUBJECTS, so a new kind is one entry there.
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Callable, Mapping
from typing import Any

from dovetail.base.errors import SpecError, UsageError, printable
from dovetail.files.spec import load_spec, to_yaml
from dovetail.proof.foreign.laws import FOREIGN
from dovetail.proof.foreign.opening import opened
from dovetail.proof.laws.case import LAWS
from dovetail.proof.laws.law import Laws, Outcome
from dovetail.proof.laws.suite import try_spec
from dovetail.proof.served import run as served

WORST = ("failed", "excepted", "excepted but passed", "passed", "not applicable")  # states, the one that says most first

ONLY_OF_SERVERS = ("model", "key", "tokenizer", "dtype", "against", "exact")
# the options that each way of running takes; any other is refused there
TAKES = {
    "sampled specs": {"quick", "only", "seed", "record"},
    "a spec": {"set", "swap", "only", "seed", "seeds"},
    "a model of another library": {"only", "seed", "as_is"},
    "a server": {"only", "seed", *ONLY_OF_SERVERS},
}


@dc.dataclass(frozen=True)
class Subject:
    """A model or a server that was opened."""

    title: str
    about: Mapping[str, Any]  # fields of the JSON report
    test: Callable[[str], Outcome]  # law -> its result


@dc.dataclass(frozen=True)
class SubjectKind:
    """The laws that a kind of subject takes, and how one is opened: open(name, seed=…, as_is=…)."""

    laws: Laws
    open: Callable[..., Subject]

    @property
    def statements(self) -> dict[str, str]:
        """What each law states."""
        return {law.name: law.says for law in self.laws.values()}


def open_foreign(name: str, seed: int = 0, as_is: bool = False) -> Subject:
    """Open a model of another library, with the laws that need no declarations."""
    case = opened(name, seed=seed, as_is=as_is)
    dtype = str(case.dtype).removeprefix("torch.")
    title = f"{case.label}  ({dtype}, equal to {case.tolerance:g} of their scale)"
    about = {"model": case.label, "dtype": dtype, "tolerance": case.tolerance}
    return Subject(title, about, lambda law: FOREIGN.test(law, case))


def spec_subject(name: str, text: str, seed: int = 0, seeds: int = 1) -> Subject:
    """The subject of a spec, given as YAML: a law is tested with weights and inputs of `seeds` seeds from `seed` on, a slow law
    with those of the first, until it fails."""

    def test(law: str) -> Outcome:
        outcomes: list[Outcome] = []
        for number in range(seed, seed + (1 if LAWS[law].slow else seeds)):
            (outcome,) = try_spec(text, [law], number)
            if outcome.state == "failed" and seeds > 1:
                outcome = dc.replace(outcome, detail=f"seed {number}: {outcome.detail}")
            outcomes.append(outcome)
            if outcome.state == "failed":
                break
        worst = min(outcomes, key=lambda outcome: WORST.index(outcome.state))
        return dc.replace(worst, seconds=sum(outcome.seconds for outcome in outcomes))

    return Subject(name, {"spec": name, "seeds": [*range(seed, seed + seeds)]}, test)


def open_spec(name: str, seed: int = 0, as_is: bool = False) -> Subject:
    """Open a preset, a .yaml file or a model directory; its weights are always the laws' own."""
    return spec_subject(name, to_yaml(load_spec(name)), seed)


def server_subject(url: str, case: served.Served) -> Subject:
    """The subject of a server whose noise is known."""
    bound = f"log-probs equal to {case.bound:.2g}, from the server's own spread"
    title = f"{printable(url)}  {printable(case.quirks.model)}  ({bound})"
    about = {"server": url, **case.quirks.data(), "noise": dc.asdict(case.noise), "bound": case.bound}
    return Subject(title, about, lambda law: served.SERVED.test(law, case))


def open_server(name: str, seed: int = 0, as_is: bool = False) -> Subject:
    """Open a running server, and measure its noise; its weights are its own."""
    return server_subject(name, served.calibrated(served.opened(name, seed=seed)))


SPEC, SERVER = SubjectKind(LAWS, open_spec), SubjectKind(served.SERVED, open_server)
SUBJECTS: dict[str, SubjectKind] = {
    **dict.fromkeys(("hf:", "py:"), SubjectKind(FOREIGN, open_foreign)),
    **dict.fromkeys(("http://", "https://"), SERVER),
}


def kind_of(name: str) -> SubjectKind:
    """The kind of subject that a name belongs to."""
    return next((kind for prefix, kind in SUBJECTS.items() if name.startswith(prefix)), SPEC)


def check_options(given: bool, kind: SubjectKind, options: Mapping[str, Any]) -> None:
    """Raise for an option that the way of running does not use; `given` says whether there is a subject."""
    way = _way(given, kind)
    unused = [
        name for name, value in options.items() if value not in (False, 0, None) and value != () and name not in TAKES[way]
    ]
    flags = [f"--{name.replace('_', '-')}" for name in unused]
    if kind is not SERVER and (served := [flag for flag, name in zip(flags, unused, strict=True) if name in ONLY_OF_SERVERS]):
        raise UsageError(f"{served[0]}: is for a server, and none is given; name one: dovetail laws http://HOST/v1")
    if {"set", "swap"} & {*unused}:
        raise SpecError("--set, --swap", "change a spec, and none is given", "name one: dovetail laws SPEC --swap …")
    if "record" in unused:
        raise UsageError("--record: outcomes are recorded for all sampled specs; leave out the spec")
    if flags:
        raise UsageError(f"{flags[0]}: is not used on {way}; leave it out")
    if options["seeds"] is not None and options["seeds"] < 1:
        raise UsageError(f"--seeds: is {options['seeds']}; the minimum is 1")
    if options["against"] is not None and kind_of(options["against"]) is not SERVER:
        raise UsageError(f"--against: {printable(options['against'])} is not the URL of a server; write http://HOST/v1")


def _way(given: bool, kind: SubjectKind) -> str:
    """The key of TAKES."""
    if not given:
        return "sampled specs"
    return "a spec" if kind is SPEC else "a server" if kind is SERVER else "a model of another library"
