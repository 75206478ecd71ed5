"""The run file of a run: every setting under the name of its flag, and digests of what the run read. Plain data, no torch.

run: 1                                    the version of the format
spec: {width: 256, …}                     the spec after --swap and --set
text: plays.txt                           … and so on: batch, length, steps, schedule, precision, seed
keep: 3                                   free: may differ when the run is resumed, as prompt and sample may
recorded: {data: {sha256: …}}             what was read; other data under the same name is another run
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from dovetail.base.errors import FileError
from dovetail.disk.model_files import RUN_FILE
from dovetail.disk.yaml import parse_yaml, read_text

FORMAT = 1
RECORDED = "recorded"
# keys that decide no number of a run: a resume may change them
FREE = (
    "shards",
    "sequence",
    "ring",
    "tensor",
    "pipeline",
    "checkpoint_minutes",
    "keep",
    "timeout",
    "log",
    "prompt",
    "sample",
    "sample_every",
    "temperature",
)


def run_data(settings: Mapping[str, Any], recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a run file, as YAML gives it back; settings without a value are left out."""
    given = {name: value for name, value in settings.items() if value is not None}
    return json.loads(json.dumps({"run": FORMAT, **given, RECORDED: recorded}))


def check_recorded(recorded: Mapping[str, Any], found: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise FileError where the data or the initial weights have other contents than under the same name in a run file."""
    for what, now in found.items():
        before = recorded.get(what)
        if isinstance(before, Mapping) and before.get("name") == now["name"] and before.get("sha256") != now["sha256"]:
            changed = f"the run file recorded SHA-256 {str(before.get('sha256'))[:12]}…, now it is {now['sha256'][:12]}…"
            raise FileError(f"{now['name']}: has changed: {changed}; remove `{RECORDED}` from the run file to train on it")


def read_run(place: Path) -> dict[str, Any]:
    """Return the run file of a run directory."""
    return mapping_of(parse_yaml(read_text(place / RUN_FILE), str(place / RUN_FILE)), place / RUN_FILE)


def mapping_of(data: Any, path: Path) -> dict[str, Any]:
    """Return the settings of a run file; raise FileError where they are none, or of another format."""
    if not isinstance(data, Mapping):
        raise FileError(f"{path}: is not a mapping of settings")
    if data.get("run", FORMAT) != FORMAT:
        raise FileError(f"{path}: run: {str(data['run'])[:40]} is not a format of run files; this version reads run: {FORMAT}")
    return dict(data)


def differing(a: Mapping[str, Any], b: Mapping[str, Any], without: Iterable[str] = ()) -> Iterator[tuple[str, Any, Any]]:
    """(path, value in a, value in b) of every setting that differs, in the order of the files; missing and None are one."""
    left, right = (dict(_flat({key: value for key, value in data.items() if key not in set(without)})) for data in (a, b))
    for path in {**left, **right}:
        if left.get(path) != right.get(path):
            yield path, left.get(path), right.get(path)


def _flat(data: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    items = data.items() if isinstance(data, Mapping) else enumerate(data) if isinstance(data, (list, tuple)) else None
    if items is None:
        yield path, data
        return
    for key, value in items:
        yield from _flat(value, f"{path}.{key}" if path else str(key))
