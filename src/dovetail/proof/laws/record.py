"""A record of the suite: the outcomes of each spec, a line each, as they are found. The same run again continues it.

    {"format": 1, "sources": "…", "seed": 0, "quick": false}                       the first line
    {"spec": "width: 28 …", "outcomes": [{"law": "causal", "state": "passed", …}]}

A run that is killed loses the specs that were being tested. A record of other sources is refused: the code that it tested is
not this one. A last line that was cut off is dropped.
"""

from __future__ import annotations

import dataclasses as dc
import hashlib
import json
from pathlib import Path
from typing import Any

import torch

from dovetail.base.errors import FileError
from dovetail.disk.atomic import write_atomically
from dovetail.disk.untrusted import parse_object, read_regular
from dovetail.proof.laws.law import Outcome

FORMAT = 1
MOST_BYTES = 1 << 30


def sources() -> str:
    """A hash of the installed package, and of the version of torch."""
    root, digest = Path(__file__).parents[2], hashlib.sha256(torch.__version__.encode())
    for path in sorted(root.rglob("*")):
        if path.suffix in (".py", ".yaml"):
            digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


class Record:
    """The outcomes of a run of the suite, in a file."""

    def __init__(self, path: str | Path, **run: Any) -> None:
        self.path, self.outcomes = Path(path), dict[str, list[Outcome]]()
        header = {"format": FORMAT, "sources": sources(), **run}
        text = read_regular(self.path, MOST_BYTES, "a record of laws") if self.path.exists() else ""
        first, *lines = text.splitlines(keepends=True) or [json.dumps(header) + "\n"]
        if parse_object(first.encode(), f"{self.path}, line 1") != header:
            raise FileError(f"{self.path}: records a run of other sources or options; name another file, or delete it")
        whole = [line for line in lines if line.endswith("\n")]  # the last may have been cut off
        for number, line in enumerate(whole, 2):
            data = parse_object(line.encode(), f"{self.path}, line {number}")
            rows = ({**row, "exceptions": [(part, reason) for part, reason in row["exceptions"]]} for row in data["outcomes"])
            self.outcomes[data["spec"]] = [Outcome(**row) for row in rows]
        write_atomically(self.path, first + "".join(whole))

    def add(self, spec: str, outcomes: list[Outcome]) -> None:
        """Append the outcomes of a spec."""
        self.outcomes[spec] = outcomes
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"spec": spec, "outcomes": [dc.asdict(outcome) for outcome in outcomes]}) + "\n")
