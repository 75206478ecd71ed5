"""Our safetensors reader and writer compared with the safetensors package."""

import faulthandler
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from dovetail.base.errors import FileError
from dovetail.disk.tensors import DTYPES, TensorFile, write_tensors

KINDS = [dtype for dtype in DTYPES.values() if dtype is not torch.float8_e8m0fnu]


def some_tensors() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(3)
    made = {str(dtype): (torch.randn(5, 3, generator=draw) * 3).to(dtype) for dtype in KINDS}
    return {**made, "none": torch.zeros(0, 4), "scalar": torch.tensor(2.5), "turned": torch.randn(7, 2, generator=draw).T}


def same(one: torch.Tensor, two: torch.Tensor) -> bool:
    bits = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, two) if tensor.numel()]
    return one.shape == two.shape and one.dtype == two.dtype and (not bits or torch.equal(bits[0], bits[1]))


def test_our_files_are_read_by_the_safetensors_package(tmp_path: Path) -> None:
    tensors = some_tensors()
    write_tensors(tmp_path / "a", tensors, reversed(list(tensors.items())))
    read = load_file(tmp_path / "a")
    assert read.keys() == tensors.keys()
    assert all(same(read[name], tensors[name]) for name in tensors)


def test_files_of_the_safetensors_package_are_read(tmp_path: Path) -> None:
    tensors = {name: tensor.contiguous() for name, tensor in some_tensors().items()}
    save_file(tensors, tmp_path / "a", metadata={"format": "pt"})
    with TensorFile(tmp_path / "a") as file:
        assert file.entries.keys() == tensors.keys()
        assert all(same(file.read(name), tensors[name]) for name in tensors)


def test_a_layout_is_enough_to_write_by(tmp_path: Path) -> None:
    tensors = some_tensors()
    layout = {name: tensor.to("meta") for name, tensor in tensors.items()}
    write_tensors(tmp_path / "a", layout, iter(tensors.items()))
    assert same(load_file(tmp_path / "a")["turned"], tensors["turned"].contiguous())
    with pytest.raises(AssertionError, match="was not given"):
        write_tensors(tmp_path / "b", layout, [])


def test_every_tensor_is_aligned(tmp_path: Path) -> None:
    tensors = {
        "bytes": torch.zeros(3, dtype=torch.uint8),
        "wide": torch.zeros(2, dtype=torch.float64),
        "half": torch.zeros(1).half(),
    }
    write_tensors(tmp_path / "a", tensors, tensors.items())
    with TensorFile(tmp_path / "a") as file:
        assert all(entry.start % entry.dtype.itemsize == 0 for entry in file.entries.values())


def test_a_file_that_shrinks_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(1000)}
    write_tensors(tmp_path / "a", tensors, tensors.items())
    with TensorFile(tmp_path / "a") as file:
        with (tmp_path / "a").open("r+b") as cut:
            cut.truncate(500)
        with pytest.raises(FileError, match="its size changed"):
            file.read("a")


def test_writing_to_a_tensor_does_not_change_the_file(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(6.0), "b": torch.ones(5, 3)}
    write_tensors(tmp_path / "a", tensors, tensors.items())
    with TensorFile(tmp_path / "a") as file:
        read = {name: file.read(name) for name in tensors}
        again = file.read("a")
    read["a"].zero_()  # also when the file is closed
    save_file(read, tmp_path / "b")  # tensors of their own, as the reference asks for
    assert load_file(tmp_path / "a")["a"].equal(tensors["a"])
    assert load_file(tmp_path / "b")["a"].equal(torch.zeros(6))
    assert again.equal(torch.zeros(6))  # the same pages


def test_unaligned_tensors_are_read(tmp_path: Path) -> None:
    header = b'{"b":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},"w":{"dtype":"F32","shape":[2],"data_offsets":[3,11]}}'
    numbers = torch.tensor([1.5, -2.0])
    (tmp_path / "a").write_bytes(len(header).to_bytes(8, "little") + header + b"abc" + numbers.numpy().tobytes())
    with TensorFile(tmp_path / "a") as file:
        assert file.read("w").equal(numbers)


# -- why safetensors.safe_open does not read untrusted files ---------------------------------------------------------


def raw_file(header: bytes, data: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + data


def in_child(work: Callable[[], None]) -> int:
    """Run a function in a child process; its exit code, or the negative number of the signal that ended it."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_safe_open_takes_the_last_of_two_tensors_with_one_name(tmp_path: Path) -> None:
    entry = b'"a":{"dtype":"F32","shape":[%s],"data_offsets":[0,8]}'
    (tmp_path / "a").write_bytes(raw_file(b"{" + entry % b"2" + b"," + entry % b"1,2" + b"}", bytes(8)))
    with safe_open(tmp_path / "a", "pt") as file:
        assert file.get_tensor("a").shape == (1, 2)
    with pytest.raises(FileError, match="the key 'a' is given twice"):
        TensorFile(tmp_path / "a")


def test_safe_open_dies_where_a_file_is_truncated_before_a_tensor_is_read(tmp_path: Path) -> None:
    tensors = {"a": torch.ones(2**20)}
    write_tensors(tmp_path / "a", tensors, tensors.items())

    def read() -> None:
        faulthandler.disable()  # the child is meant to die
        file = safe_open(tmp_path / "a", "pt")
        os.truncate(tmp_path / "a", 500)
        file.get_tensor("a").sum()

    assert in_child(read) == -signal.SIGBUS


def test_safe_open_follows_links_and_parses_a_large_header(tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(raw_file(b"{" + b" " * 20_000_000 + b"}", b""))
    (tmp_path / "link").symlink_to("large")
    with safe_open(tmp_path / "link", "pt") as file:
        assert list(file.keys()) == []
    with pytest.raises(FileError, match="more than 16,777,216 are not read"):
        TensorFile(tmp_path / "large")
    with pytest.raises(FileError, match="cannot be read"):
        TensorFile(tmp_path / "link")
