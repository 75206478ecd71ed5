"""Building token shards: bit-equal whatever the workers and interruptions."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import dovetail as dt
from dovetail.api.build_data import build_data
from dovetail.api.show_data import show_data
from dovetail.base.errors import FileError, ResourceError, UsageError
from dovetail.data import duplicates, executors
from dovetail.data.build import WORK
from dovetail.data.corpora import open_tokens
from dovetail.data.executors import InProcess, ProcessPool
from dovetail.data.manifest import Manifest
from dovetail.text.learn import learn
from dovetail.text.tokenizer import Tokenizer

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "naïve", "日本語"]
DOCUMENTS = [" ".join(random.Random(i // 2).choices(WORDS, k=3 + i % 17)) for i in range(700)]  # some are equal


@pytest.fixture(autouse=True)
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dovetail.data.plan.UNIT_BYTES", (4000, 10**9))
    monkeypatch.setattr("dovetail.api.build_data.available_workers", lambda: 1)  # a process takes seconds to start


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f"{json.dumps({'text': text})}\n" for text in DOCUMENTS))
    return path


def content(directory: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.iterdir())
        if path.is_file() and path.name != ".lock"
    }


def texts(directory: Path, split: str = "train") -> list[str]:
    tokens, tokenizer = open_tokens(directory, split), Tokenizer.load(directory)
    ends = [0, *tokens.ends(0, tokens.tokens).tolist()]
    ids = [tokens.read(start, stop).tolist() for start, stop in itertools.pairwise(ends)]
    assert all(some[-1] == 0 for some in ids)
    return [tokenizer.decode(some) for some in ids]


def test_every_document_is_in_one_split_in_order(rows: Path, tmp_path: Path) -> None:
    result = build_data(rows, tmp_path / "out", held_out=0.2, quiet=True)
    train, held_out = texts(tmp_path / "out"), texts(tmp_path / "out", "held_out")
    assert sorted(train + held_out) == sorted(DOCUMENTS)
    assert not set(train) & set(held_out)  # equal documents are in the same split
    chosen = set(held_out)
    assert train == [text for text in DOCUMENTS if text not in chosen]
    assert 0.12 < len(held_out) / len(DOCUMENTS) < 0.28
    splits = result.manifest.splits
    assert splits["train"].bytes + splits["held_out"].bytes == sum(len(text.encode()) for text in DOCUMENTS)
    assert splits["held_out"].tokens == sum(len(text.encode()) + 1 for text in held_out)
    assert len(splits["train"].shards) > 5
    assert show_data(tmp_path / "out", verify=True, quiet=True).problems == ()


@pytest.mark.slow
def test_the_result_does_not_depend_on_workers_or_units_order(rows: Path, tmp_path: Path) -> None:
    class Backwards(InProcess):
        def run(self, work, numbers):  # type: ignore[no-untyped-def]
            yield from super().run(work, numbers[::-1])

    for name, executor in (("one", InProcess()), ("two", ProcessPool(2)), ("back", Backwards())):
        build_data(rows, tmp_path / name, deduplicate=True, held_out=0.1, executor=executor, quiet=True)
    assert content(tmp_path / "one") == content(tmp_path / "two") == content(tmp_path / "back")
    assert not (tmp_path / "one" / WORK).exists()


@pytest.mark.parametrize("merged", [10**9, 5000])
def test_the_first_of_equal_documents_stays(rows: Path, tmp_path: Path, merged: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(duplicates, "MERGED", merged)
    (tmp_path / "more.txt").write_text("\n".join([*DOCUMENTS[::-1], "new", " ", "new"]))
    result = build_data([rows, tmp_path / "more.txt"], tmp_path / "out", lines=True, deduplicate=True, held_out=0.0, quiet=True)
    expected = list(dict.fromkeys([*DOCUMENTS, "new"]))
    assert len(expected) < len(DOCUMENTS)
    assert texts(tmp_path / "out") == expected
    assert result.manifest.dropped == {"duplicates": 2 * len(DOCUMENTS) + 2 - len(expected), "empty": 1}


def test_another_tokenizer_and_its_end_token(rows: Path, tmp_path: Path) -> None:
    tokenizer = learn("\n".join(DOCUMENTS), 300)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer.json").write_text(tokenizer.to_json())
    result = build_data(rows, tmp_path / "out", tokenizer=tmp_path / "model", quiet=True)
    assert result.manifest.tokenizer.vocab == tokenizer.size
    assert result.manifest.splits["train"].tokens < result.manifest.splits["train"].bytes
    file = tmp_path / "model" / "tokenizer.json"
    assert result.manifest.tokenizer.sha256 == hashlib.sha256(file.read_bytes()).hexdigest()
    again = build_data(rows, tmp_path / "again", tokenizer=file, quiet=True)
    assert again.manifest.fingerprint == result.manifest.fingerprint
    other = build_data(rows, tmp_path / "other", tokenizer=tokenizer, end="", quiet=True).manifest
    count = other.splits["train"].documents
    assert other.splits["train"].tokens == result.manifest.splits["train"].tokens - count
    file.write_text(tokenizer.to_json().replace("<|end|>", "</s>"))
    with pytest.raises(UsageError, match=r"--end: tokenizer_config\.json has no eos_token"):
        build_data(rows, tmp_path / "third", tokenizer=file, quiet=True)
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "</s>"}}))
    third = build_data(rows, tmp_path / "third", tokenizer=file, quiet=True)
    assert third.manifest.tokenizer.end == 0
    with pytest.raises(FileError, match=r"nothing: no such tokenizer; give a directory with a tokenizer\.json, or 'bytes'"):
        build_data(rows, tmp_path / "fourth", tokenizer="nothing", quiet=True)


# -- interruptions ----------------------------------------------------------------------------------------------------------


class Broken(Exception):
    pass


class Some(InProcess):
    """Works on a few units, then fails."""

    def __init__(self, units: int) -> None:
        self.units = units

    def run(self, work, numbers):  # type: ignore[no-untyped-def]
        for number in numbers:
            if not self.units:
                raise Broken
            self.units -= 1
            work(number)
            yield number


def test_a_build_continues_where_it_failed(rows: Path, tmp_path: Path) -> None:
    build_data(rows, tmp_path / "whole", deduplicate=True, quiet=True)
    for attempts in range(100):
        try:
            build_data(rows, tmp_path / "out", deduplicate=True, executor=Some(3), quiet=True)
        except Broken:
            with pytest.raises(FileError, match="is an unfinished corpus"):
                open_tokens(tmp_path / "out")
        else:
            assert attempts > 5
            break
    assert content(tmp_path / "out") == content(tmp_path / "whole")
    build_data(rows, tmp_path / "out", deduplicate=True, executor=Some(0), quiet=True)  # nothing is left to do


CHILD = """
import sys
from dovetail.data import plan
plan.UNIT_BYTES = (4000, 10**9)
import dovetail as dt
from dovetail.api.build_data import build_data
if __name__ == "__main__":
    build_data(sys.argv[1], sys.argv[2], deduplicate=True, held_out=0.1, workers=2, quiet=True)
"""


@pytest.mark.slow
def test_a_build_that_was_killed_is_bit_equal_and_leaves_no_process(rows: Path, tmp_path: Path) -> None:
    build_data(rows, tmp_path / "whole", deduplicate=True, held_out=0.1, quiet=True)
    script, out = tmp_path / "child.py", tmp_path / "out"
    script.write_text(CHILD)
    for count in (2, 6, 10):  # records when the parent is killed
        child = subprocess.Popen([sys.executable, str(script), str(rows), str(out)])
        while child.poll() is None and len(list((out / WORK).glob("*.*"))) < 2 * count:
            time.sleep(0.001)
        workers = [int(pid) for pid in Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()]
        child.send_signal(signal.SIGKILL)
        child.wait()
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline and any(os.path.exists(f"/proc/{pid}/exe") for pid in workers):
            time.sleep(0.05)
        assert not [pid for pid in workers if os.path.exists(f"/proc/{pid}/exe")]
    build_data(rows, out, deduplicate=True, held_out=0.1, quiet=True)
    assert content(out) == content(tmp_path / "whole")


def test_another_build_in_the_same_place_is_refused(rows: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    before = build_data(rows, out, quiet=True)
    with pytest.raises(FileError, match=r"out: holds a corpus of other inputs or settings \(held_out was 0.01 and is 0.02\)"):
        build_data(rows, out, held_out=0.02, quiet=True)
    (tmp_path / "more.txt").write_text("more")
    with pytest.raises(FileError, match=r"more\.txt is a new input\); choose another, or use --force"):
        build_data([rows, tmp_path / "more.txt"], out, quiet=True)
    os.utime(rows, (1, 1))
    with pytest.raises(FileError, match=r"rows\.jsonl was changed since"):
        build_data(rows, out, quiet=True)
    after = build_data(rows, out, held_out=0.3, force=True, quiet=True)
    assert after.manifest.fingerprint != before.manifest.fingerprint
    assert show_data(out, verify=True, quiet=True).problems == ()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    for force in (False, True):
        with pytest.raises(FileError, match=r"full: is not empty \(it holds thesis\.txt\)"):
            build_data(rows, tmp_path / "full", force=force, quiet=True)


def test_a_corpus_that_is_being_replaced_is_called_unfinished(rows: Path, tmp_path: Path) -> None:
    class Killed(InProcess):
        def run(self, work, numbers):  # type: ignore[no-untyped-def]
            raise KeyboardInterrupt

    out = tmp_path / "out"
    build_data(rows, out, quiet=True)
    with pytest.raises(KeyboardInterrupt):
        build_data(rows, out, held_out=0.3, force=True, quiet=True, executor=Killed())
    with pytest.raises(FileError, match="is an unfinished corpus; run the same"):
        Manifest.load(out)
    for name in os.listdir(out / WORK):
        (out / WORK / name).unlink()
    (out / WORK).rmdir()
    (out / "plan.json").write_text("{}")  # as a kill before the new plan leaves it
    with pytest.raises(FileError, match="is an unfinished corpus"):
        Manifest.load(out)
    build_data(rows, out, held_out=0.3, force=True, quiet=True)
    assert show_data(out, verify=True, quiet=True).problems == ()


def test_an_input_that_changes_during_the_build_is_refused(rows: Path, tmp_path: Path) -> None:
    class Changes(InProcess):
        def run(self, work, numbers):  # type: ignore[no-untyped-def]
            rows.write_text("")
            yield from super().run(work, numbers)

    with pytest.raises(FileError, match=r"rows\.jsonl: was changed since the build began"):
        build_data(rows, tmp_path / "out", executor=Changes(), quiet=True)


def test_an_error_in_a_worker_names_the_line(rows: Path, tmp_path: Path) -> None:
    with rows.open("a") as file:
        file.write("{broken\n")
    with pytest.raises(FileError, match=r"rows\.jsonl:701: is not JSON"):
        build_data(rows, tmp_path / "out", workers=2, quiet=True)


def _killed(number: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_a_worker_that_is_killed_is_reported() -> None:
    with pytest.raises(ResourceError, match=r"a worker process was ended, .* run the same command again, with fewer --workers"):
        list(ProcessPool(2).run(_killed, [1, 2]))
    assert executors.available_workers() >= 1


def test_two_builds_at_once_are_refused(rows: Path, tmp_path: Path) -> None:
    class Nested(InProcess):
        def run(self, work, numbers):  # type: ignore[no-untyped-def]
            with pytest.raises(FileError, match="another process builds here"):
                build_data(rows, tmp_path / "out", quiet=True)
            yield from super().run(work, numbers)

    build_data(rows, tmp_path / "out", executor=Nested(), quiet=True)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"held_out": 1.0}, "held_out: 1 is not from 0 to 0.999"),
        ({"workers": 0}, "workers: 0 is not from 1"),
        ({"workers": 2, "cluster": "auto"}, "workers: .* give one of them"),
        ({"lines": True, "separator": ""}, "separator: with lines=True"),
        ({"separator": "\n"}, "separator: is compared with whole lines"),
        ({"format": "csv"}, "format: 'csv' is none of its values"),
    ],
)
def test_options_that_cannot_be_right(rows: Path, tmp_path: Path, options: dict[str, object], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        dt.build_data(rows, tmp_path / "out", **options, quiet=True)  # type: ignore[arg-type]


def test_too_few_documents_to_hold_one_out(tmp_path: Path) -> None:
    (tmp_path / "play.txt").write_text("To be, or not to be")
    notes: list[str] = []
    result = build_data(tmp_path / "play.txt", tmp_path / "out", quiet=True, note=notes.append)
    assert "no document is held out" in notes[-1]
    assert "held_out" in str(result)
    with pytest.raises(FileError, match=r"\(held_out\): holds no tokens"):
        open_tokens(tmp_path / "out", "held_out")
