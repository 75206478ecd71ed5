"""laws, verify, plan and runs print each result when it is known, also into a pipe; --jsonl prints one object per result.

The process of each test waits after its first result until the test has read that, so a result that is printed at the end only
is a deadlock, which ends in an error.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import dovetail as dt
from dovetail.cli import main

SPEC = "{width: 28, vocab: 270, layers: [{repeat: 2, mixer: {heads: 2, kv_heads: 1}, ffn: {hidden: 44}}]}"
# replaces MODULE.NAME by a function that waits for the file GO from its second call on
WAITS = """
import importlib, pathlib, time
module = importlib.import_module("{module}")
function, calls = getattr(module, "{name}"), []

def waits(*args, **options):
    end = time.monotonic() + 120
    while calls and not pathlib.Path("go").exists():
        assert time.monotonic() < end, "the first result was not read"
        time.sleep(0.01)
    calls.append(args)
    return function(*args, **options)

setattr(module, "{name}", waits)
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A spec, two runs, and a model."""
    place = tmp_path_factory.mktemp("events")
    (place / "small.yaml").write_text(SPEC)
    (place / "tale.txt").write_text("It was the best of times, it was the worst of times.\n" * 40)
    for name in ("a", "b"):
        options: dict[str, Any] = {"batch": 4, "length": 16, "sample": 0, "steps": 2, "evals": 1, "quiet": True}
        dt.train(SPEC, place / "tale.txt", out=place / name, **options)
    return place


def streamed(home: Path, waits: str, first: str, *args: str) -> tuple[str, list[str], int]:
    """Return the first line with this word, which is read while the process waits, the lines after it, and the exit code."""
    module, _, name = waits.partition(":")
    (home / "waits.py").write_text(WAITS.format(module=module, name=name))
    (home / "go").unlink(missing_ok=True)
    command = [sys.executable, "-m", "dovetail", *args, "--load", "waits.py"]
    with subprocess.Popen(command, cwd=home, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = next((line for line in process.stdout if first in line), "")
        assert not (home / "go").exists()
        (home / "go").touch()
        rest, errors = process.communicate(timeout=200)
    assert line, errors
    return line, rest.splitlines(), process.returncode


CASES = {
    "runs": ("dovetail.training.record:read_record", "runs", "."),
    "laws": ("dovetail.proof.subjects:try_spec", "laws", "small.yaml", "--only", "causal", "round_trip", "--seeds", "1"),
    "verify": ("dovetail.proof.compare.check:compare_recordings", "verify", "a", "b", "--longest", "0", "--no-why"),
    "plan": ("dovetail.planning.search:plan_layout", "plan", "small.yaml", "--gpus", "4", "--batch", "8", "--length", "16"),
}


@pytest.mark.parametrize(
    "verb", ["runs", pytest.param("laws", marks=pytest.mark.slow), pytest.param("plan", marks=pytest.mark.slow)]
)
def test_the_first_object_arrives_before_the_second_is_known(home: Path, verb: str) -> None:
    waits, *args = CASES[verb]
    event = {"runs": "run", "laws": "law", "plan": "layout"}[verb]
    line, rest, code = streamed(home, waits, f'"event": "{event}"', *args, "--jsonl")
    objects = [json.loads(line), *map(json.loads, rest)]
    assert code == 0
    assert [one["event"] for one in objects] == [event] * (len(objects) - 1) + ["result"]
    (results,) = ([one for name in ("runs", "laws", "layouts") if isinstance(one := objects[-1].get(name), list)][:1],)
    listed = [{"event": event, **result} for result in results[0]]
    assert sorted(map(json.dumps, objects[:-1])) == sorted(map(json.dumps, listed))
    assert len(listed) >= 2


SHOWN = {"runs": ("a ", "complete"), "laws": ("causal", "round_trip"), "verify": ("decode A", "equal: the same function")}


@pytest.mark.parametrize("verb", ["runs", *(pytest.param(verb, marks=pytest.mark.slow) for verb in ("laws", "verify"))])
def test_the_first_line_arrives_before_the_second_is_known(home: Path, verb: str) -> None:
    (waits, *args), (first, last) = CASES[verb], SHOWN[verb]
    line, rest, code = streamed(home, waits, first, *args)
    assert code == 0
    assert any(last in one for one in rest)
    assert line.rstrip("\n") not in rest  # no result is printed again at the end


def test_json_is_one_object_and_not_with_jsonl(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["runs", str(home), "--json"])
    out, err = capsys.readouterr()
    assert (stop.value.code, len(json.loads(out)["runs"])) == (0, 2)
    assert "complete" in err  # rows, when they are known
    with pytest.raises(SystemExit) as stop:
        main(["runs", str(home), "--json", "--jsonl"])
    assert (stop.value.code, "--json, --jsonl: choose one" in capsys.readouterr().err) == (2, True)


def test_watch_gets_each_result_and_every_result_has_a_page(home: Path, tmp_path: Path) -> None:
    events: list[Any] = []
    result = dt.runs(home, watch=events.append)
    assert [event.to_dict()["run"] for event in events] == [str(home / "a"), str(home / "b")]
    assert [str(event).split()[-1] for event in events] == ["complete", "complete"]
    page = result.to_html()
    assert page.count("<polyline") == 2
    assert str(home / "a") in page
    emitted = dt.emit(SPEC)._repr_html_()  # a result without a page of its own
    assert emitted.startswith('<div class="dovetail"')
    assert "class Model" in emitted or "import torch" in emitted
    assert "<td" in dt.list_parts("norm")._repr_html_()
