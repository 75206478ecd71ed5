"""Directories replaced as a whole: by several writers at once, by writers that are killed, by links, without exchange."""

from __future__ import annotations

import os
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from dovetail.base.errors import FileError
from dovetail.disk import replace
from dovetail.disk.replace import replacing, set_aside

FILES = ("a", "b", "c")


def write(target: Path, text: str, pause: float = 0.0) -> None:
    """Replace the target by a directory whose files all hold the same text."""
    with replacing(target, lambda _: None) as fresh:
        for name in FILES:
            (fresh / name).write_text(text)
            time.sleep(pause)


def whole(target: Path) -> str:
    """The text of a directory, which must be whole."""
    texts = {name: (target / name).read_text() for name in FILES}
    assert {path.name for path in target.iterdir()} == set(FILES)
    assert len(set(texts.values())) == 1, texts
    return texts["a"]


def in_child(work: Callable[[], None]) -> int:
    """Run a function in a child process; its id."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return pid


@pytest.fixture(params=["exchange", "two renames"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "two renames":
        monkeypatch.setattr(replace, "_exchange", lambda one, two: False)
    return request.param


def test_the_old_directory_goes_with_all_its_files(tmp_path: Path, way: str) -> None:
    write(tmp_path / "out", "old")
    (tmp_path / "out" / "mine").write_text("stale")
    write(tmp_path / "out", "new")
    assert whole(tmp_path / "out") == "new"
    assert os.listdir(tmp_path) == ["out"]


def test_two_writers_at_once_both_succeed(tmp_path: Path, way: str) -> None:
    target = tmp_path / "out"

    def rounds(name: str) -> Callable[[], None]:
        def work() -> None:
            for i in range(20):
                write(target, f"{name}{i}", pause=0.0005)

        return work

    pids = [in_child(rounds(name)) for name in "xyz"]
    while pids:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            assert status == 0, "a writer failed"
            pids.remove(pid)
        if way == "exchange" and target.exists():  # never half a directory, and never none
            assert target.is_dir()
    assert whole(target) in {"x19", "y19", "z19"}
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("delay", [0.001, 0.004, 0.01, 0.02, 0.04])
def test_a_killed_writer_leaves_a_complete_directory_and_files_that_the_next_deletes(
    tmp_path: Path, delay: float, way: str
) -> None:
    target = tmp_path / "out"
    write(target, "first")

    def work() -> None:
        while True:
            write(target, "again", pause=0.001)

    pid = in_child(work)
    time.sleep(delay)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    if way == "exchange" or target.exists():
        assert whole(target) in {"first", "again"}
    else:
        aside = set_aside(target)
        assert aside is not None
        assert whole(aside) in {"first", "again"}
    write(target, "last")
    write(target, "last")
    assert whole(target) == "last"
    assert os.listdir(tmp_path) == ["out"]


def test_a_writer_that_dies_between_two_renames_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, rename, done = tmp_path / "out", os.rename, []
    write(target, "old")
    monkeypatch.setattr(replace, "_exchange", lambda one, two: False)

    def die(source: Path, destination: Path) -> None:
        if done:
            os._exit(7)
        done.append(source)
        rename(source, destination)

    monkeypatch.setattr(os, "rename", die)
    pid = in_child(lambda: write(target, "new"))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    monkeypatch.undo()
    aside = set_aside(target)
    assert aside is not None
    assert whole(aside) == "old"
    write(target, "newer")
    assert set_aside(target) is None


def test_a_failure_leaves_the_old_directory_and_no_other(tmp_path: Path, way: str) -> None:
    target = tmp_path / "out"
    write(target, "old")

    def fail(error: BaseException) -> None:
        with replacing(target, lambda _: None) as fresh:
            (fresh / "a").write_text("half")
            raise error

    with pytest.raises(FileError, match="cannot be written"):
        fail(OSError(28, "No space left on device"))
    with pytest.raises(KeyboardInterrupt):
        fail(KeyboardInterrupt())
    assert whole(target) == "old"
    assert os.listdir(tmp_path) == ["out"]


def test_a_second_rename_that_fails_brings_the_old_directory_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, rename = tmp_path / "out", os.rename
    write(target, "old")

    def fail(source: Path, destination: Path) -> None:
        if str(source).endswith(".tmp"):
            raise OSError(5, "Input/output error")
        rename(source, destination)

    monkeypatch.setattr(replace, "_exchange", lambda one, two: False)
    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(FileError, match="Input/output error"):
        write(target, "new")
    assert whole(target) == "old"


def test_a_directory_of_a_live_writer_is_left_alone(tmp_path: Path) -> None:
    target = tmp_path / "out"
    with replacing(target, lambda _: None) as fresh:
        os.utime(fresh, (0, 0))  # locked: its age does not matter
        write(target, "other")
        assert fresh.is_dir()
        for name in FILES:
            (fresh / name).write_text("own")
    assert whole(target) == "own"


def test_leftovers_go_by_their_name_age_and_process(tmp_path: Path) -> None:
    alive, dead = f".out.{os.getpid()}-00000000.tmp", ".out.999999999-00000000.tmp"
    others = (".out.tmp", "out.old", ".outer.999999999-00000000.tmp", ".out.999999999-0000000.tmp")
    for name in (alive, dead, *others):
        (tmp_path / name).mkdir()
    (tmp_path / ".out.999999999-00000001.tmp").symlink_to(tmp_path / "out.old")
    write(tmp_path / "out", "one")
    assert set(os.listdir(tmp_path)) == {"out", alive, *others, ".out.999999999-00000001.tmp"}
    os.utime(tmp_path / alive, (0, 0))
    write(tmp_path / "out", "two")
    assert alive not in os.listdir(tmp_path)


def test_the_check_is_made_again_before_the_swap(tmp_path: Path) -> None:
    target = tmp_path / "out"

    def refuse(place: Path) -> None:
        raise FileError(f"{place}: not to be replaced")

    def write_late() -> None:
        with replacing(target, refuse):
            target.mkdir()  # by somebody else in the meantime
            (target / "mine").write_text("mine")

    with pytest.raises(FileError, match="not to be replaced"):
        write_late()
    assert (target / "mine").read_text() == "mine"
    assert os.listdir(tmp_path) == ["out"]


def test_links_are_followed_first(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    write(tmp_path / "real" / "out", "old")
    (tmp_path / "link").symlink_to("real/out")
    (tmp_path / "dangling").symlink_to("real/later")
    write(tmp_path / "link", "new")
    write(tmp_path / "dangling", "later")
    assert (whole(tmp_path / "real" / "out"), whole(tmp_path / "real" / "later")) == ("new", "later")
    assert all((tmp_path / name).is_symlink() for name in ("link", "dangling"))
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(FileError, match="loop"):
        write(tmp_path / "loop", "never")


def test_a_long_name_still_has_a_temporary_one(tmp_path: Path) -> None:
    write(tmp_path / ("n" * 255), "one")
    write(tmp_path / ("n" * 255), "two")
    assert os.listdir(tmp_path) == ["n" * 255]
