"""Checkpoints: complete or absent, verified before use, loaded on any number of ranks."""

import json
import os
import random
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from checkpoint_jobs import load, save

from dovetail.base.errors import FileError
from dovetail.parallel.pair import Pair
from dovetail.training.checkpoint import MANIFEST, Checkpoints, read_manifest, verify

FILE = "rank-00000.safetensors"


def tensors(step: int = 0) -> dict[str, torch.Tensor]:
    return {"weights.a": torch.arange(35.0).view(5, 7) + step, "weights.b": torch.zeros(()) + step, "none": torch.zeros(0, 3)}


def saved(place: Path, *steps: int, keep: int = 3) -> Checkpoints:
    checkpoints = Checkpoints(place, keep)
    for step in steps:
        checkpoints.save(step, tensors(step), {"step": step})
    return checkpoints


def test_a_checkpoint_gives_back_tensors_and_numbers(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path / "c", 7, 12)
    path = checkpoints.latest()
    assert path == tmp_path / "c" / "step-00000012"
    into = {name: torch.full_like(value, -1) for name, value in tensors().items()}
    assert checkpoints.load(path, into) == {"step": 12}
    assert all(torch.equal(into[name], value) for name, value in tensors(12).items())
    assert Checkpoints(tmp_path / "none").latest() is None


def test_what_changes_after_save_later_is_not_saved(tmp_path: Path) -> None:
    checkpoints, values = Checkpoints(tmp_path), tensors(3)
    checkpoints.save_later(3, values, {})
    values["weights.a"].zero_()
    checkpoints.wait()
    into = tensors()
    checkpoints.load(tmp_path / "step-00000003", into)
    assert torch.equal(into["weights.a"], tensors(3)["weights.a"])


def test_the_newest_stay(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2, 3, 4, 5, keep=2)
    assert sorted(os.listdir(tmp_path)) == ["step-00000004", "step-00000005"]


def test_one_that_cannot_be_deleted_stays_with_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = saved(tmp_path, 1, 2)
    checkpoints.keep = 1

    def fails(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(shutil, "rmtree", fails)
    with pytest.warns(UserWarning, match="cannot be deleted"):
        checkpoints.save(3, tensors(3), {})
    monkeypatch.undo()
    path = checkpoints.latest()
    assert path is not None
    assert path.name == "step-00000003"
    verify(path)


def test_a_directory_without_its_final_name_is_no_checkpoint(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 1, 2)
    os.rename(tmp_path / "step-00000002", tmp_path / "step-00000002.tmp")  # as if killed before the rename
    path = checkpoints.latest()
    assert path is not None
    assert path.name == "step-00000001"
    checkpoints.save(2, tensors(2), {})
    assert sorted(os.listdir(tmp_path)) == ["step-00000001", "step-00000002"]


def test_a_complete_checkpoint_is_never_overwritten(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 1)
    before = (tmp_path / "step-00000001" / MANIFEST).read_bytes()
    checkpoints.save(1, tensors(8), {"other": 1})
    assert (tmp_path / "step-00000001" / MANIFEST).read_bytes() == before


def flips(place: Path, count: int) -> Iterator[tuple[Path, int]]:
    """Files and bits of them, sampled over the bytes of all files."""
    files = sorted(path for path in place.iterdir())
    generator = random.Random(5)
    for _ in range(count):
        file = generator.choice(files)
        yield file, generator.randrange(8 * file.stat().st_size)


def test_a_flipped_bit_is_detected_before_use(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 1, 2)
    place = tmp_path / "step-00000002"
    for file, bit in flips(place, 60):
        good = file.read_bytes()
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        file.write_bytes(bad)
        with pytest.raises(FileError):
            verify(place)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            path = checkpoints.latest()
        assert path is not None
        assert path.name == "step-00000001", (file, bit)
        file.write_bytes(good)
    verify(place)


@pytest.mark.parametrize("where", ["empty", "7", "8", "header", "last"])
@pytest.mark.parametrize("name", [FILE, MANIFEST])
def test_a_truncated_file_is_named(tmp_path: Path, name: str, where: str) -> None:
    saved(tmp_path, 1)
    file = tmp_path / "step-00000001" / name
    data = file.read_bytes()
    header = 8 + int.from_bytes(data[:8], "little") if name == FILE else len(data) // 2
    file.write_bytes(data[: {"empty": 0, "7": 7, "8": 8, "header": header, "last": len(data) - 1}[where]])
    with pytest.raises(FileError, match=name):
        verify(file.parent)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    (tmp_path / "step-00000001" / FILE).unlink()
    with pytest.raises(FileError, match="missing"):
        verify(tmp_path / "step-00000001")


def test_a_manifest_names_only_files_of_ranks(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    place = tmp_path / "step-00000001"
    data = json.loads((place / MANIFEST).read_text())
    data["files"] = {"../../etc/passwd": data["files"][FILE]}
    (place / MANIFEST).write_text(json.dumps(data))
    with pytest.raises(FileError, match="damaged"):
        read_manifest(place)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"more": torch.zeros(2)}, "holds no more"),
        ({"weights.a": torch.zeros(5, 8)}, r"\[5, 7\]"),
        ({"weights.a": torch.zeros(5, 7).double()}, "F32"),
    ],
)
def test_another_run_is_refused(tmp_path: Path, change: dict[str, torch.Tensor], problem: str) -> None:
    checkpoints = saved(tmp_path, 1)
    with pytest.raises(FileError, match=problem):
        checkpoints.load(tmp_path / "step-00000001", tensors() | change)


def test_a_full_disk_leaves_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = saved(tmp_path, 1)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(FileError, match=r"cannot be written.*No space left"):
        checkpoints.save(2, tensors(2), {})
    checkpoints.save_later(2, tensors(2), {})
    with pytest.raises(FileError, match="No space left"):
        checkpoints.wait()
    monkeypatch.undo()
    path = checkpoints.latest()
    assert path is not None
    assert path.name == "step-00000001"
    assert os.listdir(tmp_path) == ["step-00000001"]


@pytest.mark.slow
@pytest.mark.quick(1)
@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize(("data", "tensor"), [(1, 2), (2, 1)])
def test_saved_by_two_ranks_and_loaded_by_others(pair: Pair, tmp_path: Path, data: int, tensor: int, later: bool) -> None:
    first, second = pair.run(save, str(tmp_path), data, tensor, later)
    assert first == second
    for found in pair.run(load, str(tmp_path), tensor, data):  # sharded the other way
        assert found == first
    assert load(str(tmp_path), 1, 1) == first


@pytest.mark.slow
def test_saved_by_four_ranks_and_loaded_by_one_two_and_three(tmp_path: Path) -> None:
    with Pair(ranks=4) as four:
        first = four.run(save, str(tmp_path), 2, 2)[0]
    for ranks in (2, 3):
        with Pair(ranks=ranks) as some:
            assert all(found == first for found in some.run(load, str(tmp_path), ranks, 1))
    assert load(str(tmp_path), 1, 1) == first


def test_later_checkpoints_that_are_damaged_do_not_count_as_the_newest(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 5, 10, 20, 30, keep=9)
    checkpoints.keep = 2
    for step in (20, 30):
        (tmp_path / f"step-{step:08d}" / FILE).write_bytes(b"")
    checkpoints.save(11, tensors(11), {})  # a run that was resumed from the newest that verifies
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert checkpoints.latest() == tmp_path / "step-00000011"
    assert not (tmp_path / "step-00000005").exists()


def test_a_leftover_that_cannot_be_deleted_does_not_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = saved(tmp_path, 1, 2)
    checkpoints.keep = 1

    def fails(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(shutil, "rmtree", fails)
    for step in (3, 4, 5):
        with pytest.warns(UserWarning, match="cannot be deleted"):
            checkpoints.save(step, tensors(step), {})
        assert checkpoints.latest() == tmp_path / f"step-{step:08d}"
