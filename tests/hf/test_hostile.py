"""Nothing in a directory is believed: typed errors that name the file or the field, nothing run, no memory taken."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
from pathlib import Path

import hostile
import pytest
import torch
from hostile import CANARY, SHARDED, WHOLE, Bomb, good, refusal

from dovetail.files.model_dir import WEIGHTS_FILE
from dovetail.hf.load import load

MOST = 50_000  # kB


@pytest.fixture(autouse=True)
def nothing_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", WHOLE)
def test_a_spoilt_directory_is_refused_by_name(name: str, tmp_path: Path) -> None:
    change, says = WHOLE[name]
    place = good(tmp_path)
    load(place)  # it was good before
    change(place)
    said = refusal(place)
    assert says in said
    assert str(place) in said
    assert len(said) < 1500
    assert not (tmp_path / CANARY).exists()


@pytest.mark.parametrize("name", SHARDED)
def test_a_spoilt_index_is_refused_by_name(name: str, tmp_path: Path) -> None:
    change, says = SHARDED[name]
    place = good(tmp_path, shard=25_000)
    load(place)
    change(place)
    said = refusal(place)
    assert says in said
    assert str(place) in said


def test_the_canary_would_sing(tmp_path: Path) -> None:
    torch.save(Bomb(), tmp_path / "bomb.pt")
    torch.load(tmp_path / "bomb.pt", weights_only=False)
    assert (tmp_path / CANARY).exists()


def test_a_pickle_beside_safetensors_is_left_alone(tmp_path: Path) -> None:
    place = good(tmp_path)
    torch.save({"a": Bomb()}, place / "training_args.bin")
    load(place)
    assert not (tmp_path / CANARY).exists()
    with pytest.raises(hostile.DovetailError, match="is a pickle"):
        load(place / "training_args.bin")


def test_the_layout_of_the_cache_is_followed(tmp_path: Path) -> None:
    """models--owner--name/snapshots/REVISION/* -> ../../blobs/*, and no further."""
    place, root = good(tmp_path), tmp_path / "models--owner--name"
    snapshot, blobs = root / "snapshots" / "0a1b", root / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for i, name in enumerate(("config.json", WEIGHTS_FILE)):
        (place / name).rename(blobs / f"{i:040}")
        (snapshot / name).symlink_to(f"../../blobs/{i:040}")
    load(snapshot)
    load(os.path.relpath(snapshot))
    (snapshot / "config.json").unlink()
    (root / "other").mkdir()
    (blobs / f"{0:040}").rename(root / "other" / "config.json")
    (snapshot / "config.json").symlink_to("../../other/config.json")
    assert "is a link out of the directory" in refusal(snapshot)


def test_a_directory_reached_by_a_link_is_read(tmp_path: Path) -> None:
    place = good(tmp_path)
    (tmp_path / "elsewhere").symlink_to(place)
    load(tmp_path / "elsewhere")


def test_bits_that_flip_in_a_header_are_seen_or_change_no_weight(tmp_path: Path) -> None:
    place = good(tmp_path)
    whole = (place / WEIGHTS_FILE).read_bytes()
    size = 8 + int.from_bytes(whole[:8], "little")
    draw, refused = torch.Generator().manual_seed(1), 0
    for _ in range(150):
        where, bit = (int(torch.randint(n, (1,), generator=draw)) for n in (size, 8))
        flipped = bytearray(whole)
        flipped[where] ^= 1 << bit
        (place / WEIGHTS_FILE).write_bytes(flipped)
        try:
            load(place)
        except hostile.DovetailError as error:
            refused += str(place) in str(error)
    assert refused > 120  # a flip in the metadata or in a space behind the header does no harm


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
@pytest.mark.slow
def test_no_memory_is_taken(tmp_path: Path) -> None:
    (tmp_path / "good").mkdir()
    places = [str(good(tmp_path / "good"))]
    for i, (cases, shard) in enumerate(((WHOLE, 2**30), (SHARDED, 25_000))):
        for j, (change, _) in enumerate(cases.values()):
            (tmp_path / f"{i}-{j}").mkdir()
            places.append(str(good(tmp_path / f"{i}-{j}", shard)))
            change(Path(places[-1]))
    command = [sys.executable, str(Path(hostile.__file__)), *places]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert len(found) == len(WHOLE) + len(SHARDED)
    assert max(found.values()) < MOST, max(found.items(), key=lambda item: item[1])


def test_the_measure_of_memory_sees_it() -> None:
    def take() -> None:
        with mmap.mmap(-1, 80 * 2**20) as fresh:  # malloc could give freed memory that is still counted as taken
            for _ in range(80):
                fresh.write(bytes(2**20))

    assert hostile.grown(take) > 70_000
