"""Run the laws, property tests generated from the spec: on all parts, on one spec, on a model of another library, or on a
running server.

    dovetail laws llama-tiny --swap position=alibi
    dovetail laws py:model.py:tiny --only causal padded
    dovetail laws http://localhost:8000/v1
"""

from __future__ import annotations

import dataclasses as dc
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from dovetail.api.arguments import Changes, SpecLike, read_spec, silent
from dovetail.api.law_results import LawsResult, ModelLaws, SuiteLaws
from dovetail.api.options import InDir, RunDtype, Seed, Sets, Spec, Swaps
from dovetail.api.result import Event, Watch, unwatched
from dovetail.base.dtypes import dtype_name
from dovetail.base.errors import printable
from dovetail.base.extensions import load_parts
from dovetail.base.option import Option
from dovetail.base.option_group import OptionGroup, accepts_groups
from dovetail.views.blocks import styled
from dovetail.views.laws import law_row, spec_row

if TYPE_CHECKING:
    from dovetail.proof.laws.law import Outcome
    from dovetail.proof.served import run as served
    from dovetail.proof.subjects import Subject, SubjectKind

Progress = Callable[[int, int, str], None]  # (done, in all, the current law or the last failure)
Announce = Callable[[str], None]
SEEDS = 3  # of weights and inputs, on one spec: some bugs, and some wrong laws, show with few


@dc.dataclass(frozen=True)
class ServerOptions(OptionGroup):
    """What is known of a server."""

    model: Annotated[str | None, Option("On a server: the name of the model there; the first that it lists by default.")] = None
    key: Annotated[str | None, Option("On a server: its API key, sent as a bearer token.")] = None
    tokenizer: Annotated[str | Path | None, InDir("On a server that takes only text: a directory with its tokenizer.json.")] = (
        None
    )
    dtype: Annotated[
        str | None,
        RunDtype(
            "On a server: the dtype in which it computes, if known. By default the bound comes only from the server's own "
            "spread."
        ),
    ] = None
    exact: Annotated[
        bool, Option("On a server that promises batch invariance: repeated and concurrent requests must be equal bit by bit.")
    ] = False
    against: Annotated[str | None, Option("On a server with speculation: the URL of one with the same model, without.")] = None


@accepts_groups
def laws(
    spec: Annotated[
        SpecLike | None,
        Spec(
            "A preset, .yaml file or model directory; `hf:DIR` is run by transformers, `py:FILE.py:FACTORY` is any nn.Module "
            "that takes token ids: both run the laws that need no declarations. `http://HOST/v1` is a running "
            "OpenAI-compatible server.",
            argument=True,
        ),
    ] = None,
    *,
    set: Annotated[
        Changes, Sets("Change a field of SPEC first: --set layers.*.mixer.kv_heads=1; may be given many times.")
    ] = (),
    swap: Annotated[
        Changes,
        Swaps(
            "Change a part of SPEC wherever it occurs: --swap position=alibi; may be given many times, applied before --set."
        ),
    ] = (),
    only: Annotated[Sequence[str], Option("Only these laws.")] = (),
    as_is: Annotated[
        bool,
        Option(
            "With hf: and py:, do not perturb initial weights, which hide bugs. The weights of a checkpoint are never "
            "perturbed."
        ),
    ] = False,
    quick: Annotated[bool, Option("A few sampled specs that hold every kind; under a minute.")] = False,
    seed: Annotated[int, Seed("The seed of sampled specs, weights and inputs.")] = 0,
    seeds: Annotated[
        int | None,
        Option(
            "On one spec, test each law with the weights and inputs of N seeds, from --seed on; 3 by default. Slow laws use "
            "only the first."
        ),
    ] = None,
    load: Sequence[str] = (),
    record: Annotated[
        str | Path | None,
        Option("On sampled specs, append outcomes to this file; the same command continues a run that was killed."),
    ] = None,
    server: ServerOptions = ServerOptions(),
    announce: Announce | None = None,
    progress: Progress | None = None,
    watch: Watch = unwatched,
) -> LawsResult:
    """Check the laws, and return what failed.

    With a spec (a preset, a path, YAML text or an object), the laws run only on that model; `hf:DIR` and `py:FILE.py:FACTORY`
    name a model of another library, on which the laws run that need no declarations. Without one, they run on sampled specs
    that cover every pair of parts, or on a few (`quick`). `only` names the laws to run. On a spec each law runs with weights
    and inputs of `seeds` seeds from `seed` on, 3 by default; a slow law with the first. `load` are files or modules that
    register parts of your own. On sampled specs, `record` is a file that outcomes are appended to: the same call continues a
    run that was killed.

    `http://HOST/v1` is a running OpenAI-compatible server, of which `server` says what is known. `announce` gets one line,
    before the first law, with the number of requests and tokens and the estimated time. `watch` gets each result as soon as it
    is known. An option that the chosen way of running does not use is refused.
    """
    from dovetail.files.spec import to_yaml
    from dovetail.proof.laws.suite import known_laws
    from dovetail.proof.subjects import SERVER, SPEC, check_options, kind_of, spec_subject

    load_parts(load)
    kind = kind_of(spec) if isinstance(spec, str) else SPEC
    options = {"quick": quick, "only": only, "seed": seed, "seeds": seeds, "as_is": as_is, "record": record}
    check_options(spec is not None, kind, options | {"set": set, "swap": swap, **vars(server)})
    report = progress or silent
    if spec is None:
        return _on_all(quick, seed, report, record, known_laws(only), watch)
    names = kind.laws.names(only)  # before anything is opened
    if isinstance(spec, str) and kind is SERVER:
        return _on_server(spec, _opened(spec, server, seed), names, announce or silent, report, watch)
    if isinstance(spec, str) and kind is not SPEC:
        return _on_subject(kind.open(spec, seed=seed, as_is=as_is), kind, names, report, watch)
    name, changed, _ = read_spec(spec).after(set, swap)
    return _on_subject(spec_subject(name, to_yaml(changed), seed, seeds or SEEDS), SPEC, names, report, watch)


def _opened(url: str, server: ServerOptions, seed: int) -> served.Served:
    from dovetail.proof.served import run as served
    from dovetail.text.tokenizer import Tokenizer

    tokenizer = None if server.tokenizer is None else Tokenizer.load(server.tokenizer)
    dtype = None if server.dtype is None else dtype_name(server.dtype)
    known: dict[str, Any] = {**vars(server), "tokenizer": tokenizer, "dtype": dtype}
    return served.opened(url, **known, seed=seed)


def _on_all(
    quick: bool, seed: int, progress: Progress, record: str | Path | None, only: Sequence[str], watch: Watch
) -> SuiteLaws:
    from dovetail.proof.laws.suite import run_suite

    numbers = itertools.count(1)

    def tested(outcomes: Sequence[Outcome]) -> None:
        number = next(numbers)
        data = {"spec": number, "laws": [dc.asdict(outcome) for outcome in outcomes]}
        watch(Event("spec", data, spec_row(number, outcomes)))

    report = run_suite(quick, seed, progress, record=record, only=only, tested=tested)
    data = report.data()
    if quick:
        data.pop("pairs_covered")  # a few specs do not cover the pairs
    return SuiteLaws(data)


def _on_subject(subject: Subject, kind: SubjectKind, names: Sequence[str], progress: Progress, watch: Watch) -> ModelLaws:
    rows: list[Outcome] = []
    watch(Event("model", {"model": subject.title, "laws": list(names)}, styled((subject.title, "bold"))))
    for i, law in enumerate(names):
        progress(i, len(names), law)
        rows.append(subject.test(law))
        row = law_row(rows[-1], kind.statements[law], max(map(len, kind.statements)))
        watch(Event("law", dc.asdict(rows[-1]), row))
    return ModelLaws(subject.title, tuple(rows), kind.statements, subject.about)


def _on_server(
    url: str, case: served.Served, names: Sequence[str], announce: Announce, progress: Progress, watch: Watch
) -> ModelLaws:
    from dovetail.proof.served import run as served
    from dovetail.proof.subjects import SERVER, server_subject

    plan = served.planned(case, names)
    announce(f"{printable(url)}: {plan.line()}")
    asked, current = case.client.requests, ["the server's own noise"]

    def at(done: int, known: int, law: str) -> None:
        current[0] = law

    case.client.sent = lambda: progress(min(case.client.requests - asked, plan.requests), plan.requests, current[0])
    result = _on_subject(server_subject(url, served.calibrated(case)), SERVER, names, at, watch)
    return dc.replace(result, about={**result.about, "announced": plan.data(), "requests": case.client.requests})
