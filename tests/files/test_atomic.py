"""A file is written completely or not at all; files of killed writers are removed; illegal paths are refused."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from dovetail.base.errors import FileError
from dovetail.disk import atomic
from dovetail.disk.atomic import check_writable, write_atomically, writing


def test_it_replaces_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    write_atomically(path, "old")
    write_atomically(path, "new \udc80")
    assert path.read_text() == "new \\udc80"
    assert [file.name for file in tmp_path.iterdir()] == ["page.html"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def write_half(path: Path, error: BaseException) -> None:
    with writing(path) as file:
        file.write(b"half")
        raise error


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), ValueError("a bug"), KeyboardInterrupt()])
def test_after_an_error_the_old_file_is_there_and_no_other(tmp_path: Path, error: BaseException) -> None:
    path = tmp_path / "page.html"
    path.write_text("old")
    expected = FileError if isinstance(error, OSError) else type(error)
    with pytest.raises(expected):
        write_half(path, error)
    assert path.read_text() == "old"
    assert [one.name for one in tmp_path.iterdir()] == ["page.html"]


def test_what_takes_the_place_of_a_file_was_synced_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a crash of the machine can leave an empty file under the final name."""
    synced, replace, sync = list[int](), os.replace, os.fsync

    def recorded(handle: int) -> None:
        synced.append(os.fstat(handle).st_ino)
        sync(handle)

    def checked(fresh: Path, target: Path) -> None:
        assert os.stat(fresh).st_ino in synced, "renamed before it is on the disk"
        replace(fresh, target)

    monkeypatch.setattr(os, "fsync", recorded)
    monkeypatch.setattr(os, "replace", checked)
    write_atomically(tmp_path / "page.html", "text")
    assert synced


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to("real")
    write_atomically(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "new"


def test_the_leftover_of_a_killed_writer_is_deleted_and_that_of_a_living_one_stays(tmp_path: Path) -> None:
    dead = tmp_path / ".page.html.99999999-0123abcd.tmp"
    dead.write_text("half")
    with writing(tmp_path / "page.html") as file:
        file.write(b"first")
        assert not dead.exists()
        write_atomically(tmp_path / "page.html", "second")
    assert (tmp_path / "page.html").read_text() == "first"
    assert [one.name for one in tmp_path.iterdir()] == ["page.html"]


def odd_paths(place: Path) -> list[Path]:
    os.mkfifo(place / "pipe")
    (place / "loop").symlink_to("loop")
    (place / "folder").mkdir()
    names = ["pipe", "loop", "folder", "a" * 300, "nul\0", "\ud800", "none/page", "page/", "pipe/page"]
    return [*(place / name for name in names[:7]), place / "pipe" / "page", Path("/proc/page"), Path("/dev/null")]


def test_odd_paths_are_refused_at_once(tmp_path: Path) -> None:
    for path in odd_paths(tmp_path):
        with pytest.raises(FileError):
            write_atomically(path, "text")


@pytest.mark.parametrize("name", ["/proc/x", "/proc/x/y", "nul\0", "\ud800", "a" * 300, "/dev/null/x"])
def test_the_preflight_of_an_output_refuses_what_cannot_be_written(name: str, tmp_path: Path) -> None:
    with pytest.raises(FileError, match="cannot be written"):
        check_writable(tmp_path / name)


def test_the_preflight_leaves_nothing(tmp_path: Path) -> None:
    check_writable(tmp_path / "new" / "deep" / "model")
    check_writable(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_rename_that_fails_is_an_error_with_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(atomic.os, "replace", full)
    with pytest.raises(FileError, match=r"page: cannot be written \(No space left on device\)"):
        write_atomically(tmp_path / "page", "text")
    assert list(tmp_path.iterdir()) == []
