"""The laws on every causal, encoder and encoder–decoder model of transformers: which hold, which fail, for which class.

    python benchmarks/foreign.py [--json] [--only NAME …] [--roles causal encoder …] [--quick] [--laws causal chunked …]
                                 [--table foreign.json [--resume]]

Each class of a role (foreign_roles.py) is built tiny and random: its own default config with every size made small by what the
size is called (foreign_config.py), windows short enough that the 21 tokens of a law cross their edge. A class runs in a process
of its own, which is ended when it takes too long or too much memory. What cannot be built is counted, with the reason. No row
has a goal: what is counted is the state of another library.
"""

from __future__ import annotations

import contextlib
import dataclasses as dc
import json
import multiprocessing as mp
import os
import resource
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from foreign_config import shrunk
from foreign_known import BUG, LIMIT, OPEN, OURS, UNUSED, known
from foreign_roles import ROLES
from measure import Row, arguments, progress, report

from dovetail.proof.compare.transformers_side import transformers
from dovetail.proof.foreign.laws import FOREIGN, laws_on
from dovetail.proof.foreign.model import Foreign

SECONDS, BYTES = 90, 6 * 2**30  # processor time and memory of one class, at most
WAIT = 20 * SECONDS  # by the clock: a machine may have other work
QUICK = ("llama", "gpt2", "mamba")
LARGEST = 6_000_000  # parameters: what has more was not made tiny


@dc.dataclass
class Tried:
    """What became of one class."""

    name: str  # the model type
    model: str  # the class
    state: str  # tried, not built, ended
    reason: str = ""
    dtype: str = ""
    laws: list[dict[str, Any]] = dc.field(default_factory=list)
    seconds: float = 0.0
    role: str = "causal"


def made(kind: str, role: str) -> tuple[Any, Any]:
    """The model's class and the first tiny config that it can be built from."""
    library, how = transformers(), ROLES[role]
    config_class = library.models.auto.configuration_auto.CONFIG_MAPPING[kind]
    model_class = getattr(library.models.auto.modeling_auto, how.mapping)[config_class]
    reason: Exception | None = None
    for variant in range(4):
        try:
            config = shrunk(config_class, kind, variant, causal=how.causal)
            if not isinstance(config, model_class.config_class):  # the class is the text's part of more
                config = config.get_text_config()
            with torch.device("meta"):
                count = sum(p.numel() for p in model_class(config).parameters())
            if count > LARGEST:
                raise ValueError(f"{count:,} parameters although every known size is small")
            model = how.wrap(model_class(config).eval())
            with torch.no_grad():
                model(torch.randint(3, 60, (2, 21)))
            return model_class, config
        except Exception as error:
            reason = reason or error
    assert reason is not None
    raise reason


def try_class(kind: str, role: str, names: list[str], told: Any) -> None:
    """In a process of its own: build the class, test the laws, and print each result at once."""
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 1))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the library's own words
    try:
        model_class, config = made(kind, role)
        case = Foreign(lambda: ROLES[role].wrap(model_class(config)), kind)
        told.send(("built", f"{str(case.dtype).removeprefix('torch.')}, {case.tolerance:g}"))
    except BaseException as error:
        told.send(("not built", f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"))
        return
    for found in laws_on(case, names):
        told.send(("law", dc.asdict(found)))
    told.send(("done", ""))


def one(kind: str, model: str, role: str, names: list[str]) -> Tried:
    """A class tried in a child that is ended where it takes too long."""
    hears, tells = mp.get_context("fork").Pipe(duplex=False)
    child = mp.get_context("fork").Process(target=try_class, args=(kind, role, names, tells), daemon=True)
    begin, tried = time.perf_counter(), Tried(kind, model, "ended", f"took more than {SECONDS} s", role=role)
    child.start()
    tells.close()
    with contextlib.suppress(EOFError):
        while hears.poll(max(WAIT - (time.perf_counter() - begin), 0)):
            what, value = hears.recv()
            if what == "built":
                tried.state, tried.reason, tried.dtype = "tried", "", value
            elif what == "not built":
                tried.state, tried.reason = "not built", value
            elif what == "law":
                tried.laws.append(value)
            if what in ("done", "not built"):
                break
    if child.is_alive():
        child.join(2)
        child.kill()
    child.join()
    if tried.state == "ended" and child.exitcode not in (-signal.SIGXCPU, -signal.SIGKILL):
        tried.reason = f"its process ended with {child.exitcode}"
    for name in names if tried.state == "tried" else ():
        if name not in {law["law"] for law in tried.laws}:
            tried.laws.append({"law": name, "state": "not tried", "detail": f"took more than {SECONDS} s", "seconds": 0})
    tried.seconds = round(time.perf_counter() - begin, 1)
    return tried


def classes(role: str, only: list[str]) -> Iterator[tuple[str, str]]:
    """(model type, class) of each; a class that stands there under several types is tried once."""
    auto, how = transformers().models.auto.modeling_auto, ROLES[role]
    seen = set(getattr(auto, f"{how.except_of}_NAMES").values()) if how.except_of else set()
    for kind, model in sorted(getattr(auto, f"{how.mapping}_NAMES").items()):
        if (only and kind not in only) or model in seen:
            continue
        if not only:
            seen.add(model)
        yield kind, model


def figures(tried: list[Tried]) -> list[Row]:
    """How many, by role, label, law and state."""
    rows: list[Row] = []
    for role in dict.fromkeys(one.role for one in tried):
        mine = [one for one in tried if one.role == role]
        rows += [
            Row(f"{role}: classes", len(mine)),
            Row(f"{role}: classes built tiny and tried", sum(one.state == "tried" for one in mine)),
            Row(f"{role}: classes that could not be", sum(one.state != "tried" for one in mine)),
            Row(f"{role}: classes with no failure", sum(one.state == "tried" and not failures(one) for one in mine)),
        ]
        counts = Counter((law["law"], law["state"]) for one in mine for law in one.laws)
        rows += [Row(f"{role}: {name}: {state}", count) for (name, state), count in sorted(counts.items())]
    labeled = [known(one.role, one.name, law) for one in tried for law in failures(one)]
    labels, faults = Counter(what for _, what in labeled), Counter(what for _, what in set(labeled))
    rows += [Row(f"failures: {what}", labels[what]) for what in (BUG, UNUSED, LIMIT, OURS, OPEN)]
    # several classes, or several laws, may fail for one cause: a cause is a script in foreign_failures/
    return rows + [Row(f"distinct causes: {what}", faults[what]) for what in (BUG, UNUSED, LIMIT)]


def failures(one: Tried) -> list[dict[str, Any]]:
    """The laws that failed."""
    return [law for law in one.laws if law["state"] == "failed"]


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--only", nargs="*", default=[], help="model types: llama gpt2 …")
    parser.add_argument("--roles", nargs="+", choices=ROLES, default=list(ROLES), help="default: all")
    parser.add_argument("--laws", nargs="*", default=[], help=f"these alone, of {', '.join(FOREIGN)}")
    parser.add_argument("--table", type=Path, help="write every outcome here, as JSON")
    parser.add_argument("--resume", action="store_true", help="classes that the table has are not tried again")
    asked = parser.parse_args()
    transformers()
    names = FOREIGN.names(asked.laws)
    only = asked.only or (list(QUICK) if asked.quick else [])
    chosen = [(role, kind, model) for role in asked.roles for kind, model in classes(role, only)]
    stored = [Tried(**one) for one in json.loads(asked.table.read_text())] if asked.resume else []
    before = {(one.role, one.name): one for one in stored}
    tried: list[Tried] = []
    with progress("classes", len(chosen)) as tick:
        for role, kind, model in chosen:
            mine = [name for name in names if not ROLES[role].laws or name in ROLES[role].laws]
            tried.append(before.get((role, kind)) or one(kind, model, role, mine))
            tick()
            if asked.table:
                asked.table.write_text(json.dumps([dc.asdict(one) for one in tried], indent=1, ensure_ascii=False) + "\n")
    if not asked.json:
        for each in tried:
            for law in failures(each):
                label = " ".join(known(each.role, each.name, law)).strip()
                print(f"{each.role}: {each.name} ({each.model}): {law['law']}: {law['detail']} [{label}]")
            if each.state != "tried":
                print(f"{each.role}: {each.name} ({each.model}): {each.state}: {each.reason}")
    report(figures(tried), asked.json)
    sys.exit(0)


if __name__ == "__main__":
    main()
