"""Mechanical mutants: the source with one site changed (sites.py), judged by oracles and laws.

    sites -> one is chosen -> a fresh process imports the package with that file changed -> oracles and laws -> killed or not

Before any mutant the unchanged code must pass the same checks. The likeliest checks come first, and the first failure ends the
run: oracles of kinds in the changed file, of kinds whose file uses it, of all others; then each law on the specs of its seeded
bugs, which have the windows, caches and routers that a sampled spec may lack; then every law on a few sampled specs that hold
these kinds, the slowest law last; then the sharded law, in two ranks that import the changed file too, on the specs of its
seeded bugs and on sampled ones. What the unchanged code can split must still be split, and what it refuses must be refused. A
mutant of parallel/ changes nothing on one rank, so that the sharded law alone judges it.

The process is forked from one that has imported torch and nothing of ours, so that no earlier import hides the change; for the
same reason this file imports only our errors and sites.py at the top. Memory and CPU time of the process are limited: a mutant
that loops forever is caught by the limit, and a busy machine does not make a slow one look caught.
"""

from __future__ import annotations

import dataclasses as dc
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import multiprocessing as mp
import random
import resource
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from types import ModuleType
from typing import Any

from checks.mutants.sites import ROOT, Site, mutated, sites, users
from dovetail.base.errors import DovetailError

SECONDS = 240  # of CPU time, several times what all checks take: a mutant that reaches this limit counts as killed
PATIENCE = 10  # times that by the clock; without an answer by then the mutant counts as alive, since the machine may be busy
MEMORY = 6 * 2**30  # bytes of address space; the unchanged code runs within them too
SAMPLED = 24  # specs on which the unchanged code must pass …
SPECS = 6  # … and those of them for a mutant that the oracles let pass
LAST = ("device", "every_field")  # run every program, and build a model for each field: slower than all other laws together …
SHARE = 3  # … so that one in so many of their repetitions runs
COMPILED = 2  # so many of the specs are compiled at the end
SHARDED = 12  # sampled specs for a mutant of parallel/
WAIT = 30.0  # seconds for the ranks to compare one spec: ranks that wait for each other are caught
PARALLEL = 2
RUNNING: set[Any] = set()  # the processes that judge a mutant at present
ENDING = threading.Event()

Refused = dict[str, dict[str, bool]]  # YAML of a spec -> way to split -> whether the unchanged code refuses it


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Gives the changed source for one module, and leaves all others alone."""

    def __init__(self, site: Site) -> None:
        self.name, self.source, self.path = site.module, mutated(site), str(ROOT / site.file)

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.util.spec_from_loader(fullname, self, origin=self.path) if fullname == self.name else None

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(self.source, self.path, "exec"), module.__dict__)


def _install(site: Site) -> None:
    """Limit this process and let it import the changed file."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    warnings.simplefilter("ignore")
    sys.meta_path.insert(0, _Finder(site))


def judge(site: Site | None, seed: int, specs: Sequence[str], refused: Refused, answer: Any) -> None:
    """The job of a fresh process: import with the change, run oracles and laws, send the first failure."""
    try:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        if site is not None:
            _install(site)
        answer.send(_first_failure(site, seed, specs, refused)[:200])
    except BaseException as error:  # a package that no longer imports is caught too
        lines = f"{type(error).__name__}: {error}".splitlines()  # of a rank's traceback, the last line names the cause
        answer.send(" … ".join(dict.fromkeys((lines[0], lines[-1].strip())))[:200])


def serve_mutated(site: Site, *arguments: Any) -> None:
    """The job of one rank: import with the change, then serve."""
    _install(site)
    from dovetail.parallel.pair import serve

    serve(*arguments)


def _first_failure(site: Site | None, seed: int, specs: Sequence[str], refused: Refused) -> str:
    """The first failure of an oracle or a law; empty where all hold. The unchanged code is tested on all specs."""
    if site is None:
        return _on_one_rank(site, seed, specs)
    return ("" if site.in_parallel else _on_one_rank(site, seed, specs)) or _over_ranks(site, seed, refused)


def _on_one_rank(site: Site | None, seed: int, sampled: Sequence[str]) -> str:
    """The first failure of an oracle, then of a law that needs no second rank."""
    import torch

    torch.set_num_threads(1)
    from checks.mutants.run import seeded_bugs
    from dovetail.files.spec import from_yaml
    from dovetail.proof.laws.case import LAWS, Case
    from dovetail.proof.laws.oracle import check_oracles, kinds_to_test
    from dovetail.proof.laws.suite import exceptions
    from dovetail.spec.part import KINDS, Part, walk_spec

    module, within = (site.module, site.within.partition(".")[0]) if site is not None else ("", "")
    using = users(module)

    def nearness(kind: str) -> int:
        home = KINDS[kind].__module__
        return 2 if home == module else 1 if home in using else 0

    def relevance(spec: Part) -> tuple[int, int, int]:
        """How many of its kinds are computed by the changed class, are in the changed file, or use it."""
        parts = {part.kind: part for _, part in walk_spec(spec)}
        changed = sum((module, within) in {(c.__module__, c.__name__) for c in _classes(part)} for part in parts.values())
        return changed, sum(nearness(kind) == 2 for kind in parts), sum(nearness(kind) == 1 for kind in parts)

    for kind in sorted(kinds_to_test(), key=nearness, reverse=True):
        for failure in check_oracles([kind]):
            return f"own_number: {failure}"
    names = [law.name for law in LAWS.values() if not law.slow and law.name not in ("ported", *LAST)]
    planted = {(bug.law, bug.spec.key): bug for bug in seeded_bugs().values() if bug.law in (*names, *LAST)}.values()
    tested = [(bug.law, bug.spec) for bug in sorted(planted, key=lambda bug: relevance(bug.spec), reverse=True)]
    specs = sorted(map(from_yaml, sampled), key=relevance, reverse=True)[: SPECS if site is not None else None]
    tested += [(name, spec) for name in (*names, *LAST) for spec in specs]
    tested += [("compiled", spec) for spec in specs[: COMPILED if site is not None else None]]
    cases = {spec.key: (Case(spec, seed, share=SHARE), exceptions(spec)) for _, spec in tested}
    for name, spec in tested:
        case, excepted = cases[spec.key]
        outcome = LAWS.test(name, case, excepted.get(name, []))
        if outcome.state == "failed":
            return f"{outcome.law}: {outcome.detail}"
    return ""


def _over_ranks(site: Site, seed: int, refused: Refused) -> str:
    """The first failure of the sharded law, in ranks that import the changed file."""
    if not refused:
        return ""
    from dovetail.parallel.pair import Pair
    from dovetail.proof.laws.case import RELATION
    from dovetail.proof.laws.sharded import compare_sharded

    with Pair(timeout=WAIT, main=functools.partial(serve_mutated, site)) as pair:
        for text, hows in refused.items():
            for how, compared in compare_sharded(pair, text, seed).items():
                if bool(compared.reason) != hows[how]:
                    return f"sharded: {how} is {'' if compared.reason else 'not '}refused: {compared.reason}"
                name, gap = compared.worst
                if not gap <= RELATION:
                    return f"sharded: {how}, {name} differs by {gap:.3g} of its scale"
    return ""


def refusals(seed: int) -> Refused:
    """What the unchanged code refuses to split, for the specs that a mutant is tested on; it must pass the sharded law."""
    from checks.mutants.run import seeded_bugs
    from dovetail.files.spec import to_yaml
    from dovetail.proof.laws.case import RELATION
    from dovetail.proof.laws.cover import quick_specs
    from dovetail.proof.laws.mutant import spec
    from dovetail.proof.laws.sharded import compare_sharded, the_pair

    fixed = [bug.spec for bug in seeded_bugs().values() if bug.law == "sharded"]
    plain, biased = spec(), spec(position={"kind": "t5_bias", "buckets": 8, "max_distance": 16})
    fixed += [dc.replace(plain, layers=(biased.layers[0], plain.layers[0], biased.layers[0]))]  # two layers share a weight
    fixed += [spec(heads=1, kv_heads=1)]  # two ranks cannot split one head
    refused: Refused = {}
    for text in dict.fromkeys(to_yaml(one) for one in (*fixed, *quick_specs(seed, SHARDED))):
        results = compare_sharded(the_pair(), text, seed)
        for how, compared in results.items():
            if not compared.worst[1] <= RELATION:
                raise DovetailError(f"the unchanged code does not pass: {how}, {compared.worst[0]} differs")
        refused[text] = {how: bool(compared.reason) for how, compared in results.items()}
    return refused


@functools.cache
def _sampled(seed: int) -> tuple[str, ...]:
    """The sampled specs as YAML: chosen once, by the unchanged code."""
    from dovetail.files.spec import to_yaml
    from dovetail.proof.laws.cover import quick_specs

    return tuple(to_yaml(spec) for spec in quick_specs(seed, SAMPLED))


def _classes(part: Any) -> list[type]:
    """The classes of a part and of its module."""
    module = part.module
    return [*type(part).__mro__, *(() if module is None else module.__mro__)]


def _try(site: Site | None, seed: int, refused: Refused | None = None) -> tuple[Site | None, str]:
    """Judge one mutant in a process of its own."""
    context = mp.get_context("forkserver")
    here, there = context.Pipe()
    given = (site, seed, _sampled(seed), refused or {}, there)
    process = context.Process(target=judge, args=given)  # no daemon: it starts ranks
    process.start()
    RUNNING.add(process)
    if ENDING.is_set():
        process.kill()
    there.close()
    patience = None if site is None else PATIENCE * SECONDS  # the unchanged code has four times as many specs to pass
    try:
        message = here.recv() if here.poll(patience) else ""
    except EOFError:  # killed for its memory, or for its CPU time
        message = "the process died"
    process.kill()
    process.join()
    RUNNING.discard(process)
    return site, message


def run_random(
    count: int,
    seed: int,
    within: str = "",
    tested: Callable[[dict[str, Any], int, int], None] | None = None,
) -> dict[str, Any]:
    """Judge `count` mutations chosen by `seed`, in files whose path begins with `within`: {mutants, caught, survivors …}.
    `tested` is called with each row, the number of rows so far and that of all."""
    mp.get_context("forkserver").set_forkserver_preload(["torch"])
    possible = [site for site in sites() if site.file.startswith(within)]
    chosen = random.Random(seed).sample(possible, min(count, len(possible)))
    if not all(site.in_parallel for site in chosen) and (failure := _try(None, seed)[1]):
        raise DovetailError(f"the unchanged code does not pass: {failure}")
    refused = refusals(seed)
    rows: list[dict[str, Any]] = []
    for site, message in _judged(chosen, seed, refused):
        assert site is not None
        rows.append({"name": site.name, "within": site.within, "caught": bool(message), "by": message})
        if tested is not None:
            tested(rows[-1], len(rows), len(chosen))
    rows.sort(key=lambda row: (row["caught"], row["name"]))
    caught = sum(row["caught"] for row in rows)
    alive = [row["name"] for row in rows if not row["caught"]]
    return {"mutants": len(rows), "caught": caught, "sites": len(possible), "survivors": alive, "rows": rows}


def _judged(chosen: list[Site], seed: int, refused: Refused) -> Iterator[tuple[Site | None, str]]:
    threads = ThreadPoolExecutor(PARALLEL)
    try:
        for future in as_completed([threads.submit(_try, site, seed, refused) for site in chosen]):
            yield future.result()
    except BaseException:  # interrupted: begin no other mutant, and end those that are being judged or about to be
        ENDING.set()
        for process in list(RUNNING):
            process.kill()
        raise
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
