"""Whatever ends a verb is one line on stderr with its own exit code; signals clean up; help is short and wraps."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from dovetail.base.errors import Diverged, SpecError
from dovetail.cli import main
from dovetail.cli.command import Command
from dovetail.cli.failure import DEBUG, INTERNAL, Terminated, describe

SAVING = """
import sys, time
from pathlib import Path
from dovetail import cli
from dovetail.cli.command import Command
from dovetail.disk.replace import replacing

def run(self, given):
    with replacing("out", lambda path: None) as fresh:
        (fresh / "half").write_text("half a model")
        print("writing", flush=True)
        time.sleep(60)

Command.run = run
cli.main(["show", "llama-tiny"])
"""


def failing(error: BaseException):
    def run(self, given) -> int:
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (KeyError("layers"), INTERNAL, "internal error at test_failure.py"),
        (AssertionError("\x1b[2Kall is well\nreally"), INTERNAL, r"AssertionError: \x1b[2Kall is well\nreally"),
        (RuntimeError("shapes differ"), INTERNAL, "RuntimeError: shapes differ"),
        (MemoryError(), 4, "not enough memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."), 4, "not enough memory"),
        (RecursionError("maximum recursion depth exceeded"), 4, "nested too deeply"),
        (OSError(28, "No space left on device", "out/model"), 4, "out/model: No space left on device"),
        (SpecError("width", "0 is too small"), 3, "width: 0 is too small"),
        (Diverged("loss is not finite"), 5, "loss is not finite"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (Terminated(), 143, "terminated"),
        (SystemExit(0), 2, "called sys.exit(0); there is no result"),
    ],
)
def test_every_exception_is_one_line_and_its_own_exit_code(
    error: BaseException,
    code: int,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr(Command, "run", failing(error))
    with pytest.raises(SystemExit) as ended:
        main(["show", "llama-tiny"])
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (code, "")
    assert len(err.splitlines()) == 1
    assert err.startswith("dovetail: ")
    assert line in err
    written = list(tmp_path.iterdir())
    assert len(written) == (1 if code == INTERNAL else 0)
    for file in written:
        assert str(file) in err
        assert "Traceback" in file.read_text()


def test_the_traceback_is_printed_on_request(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv(DEBUG, "1")
    monkeypatch.setattr(Command, "run", failing(KeyError("\x1b[2K")))
    with pytest.raises(SystemExit) as ended:
        main(["show", "llama-tiny"])
    err = capsys.readouterr().err
    assert ended.value.code == INTERNAL
    assert err.startswith("Traceback")
    assert "\x1b" not in err


def test_codes_of_failures_are_not_those_of_results() -> None:
    assert describe(ValueError("x"))[1] not in range(6)


def test_a_warning_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def run(self, given) -> int:
        warnings.simplefilter("always")
        warnings.warn("old\x1b[2K\nfile", stacklevel=1)
        return 0

    monkeypatch.setattr(Command, "run", run)
    with pytest.raises(SystemExit):
        main(["show", "llama-tiny"])
    assert capsys.readouterr().err == "dovetail: warning: old\\x1b[2K\\nfile\n"


def test_a_long_line_keeps_its_end(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["show", "a" * 9000])
    err = capsys.readouterr().err
    assert len(err) < 4000
    assert "File name too long" in err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_deletes_temporary_files(number: signal.Signals, code: int, tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", SAVING],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background job ignores it
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "writing\n"
    assert list(tmp_path.iterdir())
    child.send_signal(number)
    _, err = child.communicate(timeout=60)
    assert child.returncode == code
    assert len(err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is always full")
def test_a_full_disk_behind_stdout_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "dovetail", "--help"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 4
    assert done.stderr == "dovetail: No space left on device\n"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_without_unicode_gets_escapes(encoding: str) -> None:
    env = {**os.environ, "PYTHONIOENCODING": encoding}
    done = subprocess.run(
        [sys.executable, "-m", "dovetail", "laws", "--help"], env=env, capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 0


@pytest.mark.parametrize("flags", [["llama-3-405b"], ["llama-tiny", "--batch", "65536", "--length", "1000000"]])
def test_training_that_needs_more_memory_than_there_is_is_refused_at_once(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("It was the best of times. " * 100)
    with pytest.raises(SystemExit) as ended:
        main(["train", *flags, "--text", "text.txt"])
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (4, "")
    assert "GB of memory" in err
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


@pytest.mark.parametrize(
    "args",
    [
        ["train", "llama-tiny", "--text", "text.txt", "-o", "/proc/x"],
        ["show", "llama-tiny", "--html", "/proc/x.html"],
        ["train", "llama-tiny", "--text", "pipe"],
        ["show", "pipe"],
    ],
)
def test_paths_are_checked_before_torch_is_imported(args: list[str], tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("It was the best of times. " * 100)
    os.mkfifo(tmp_path / "pipe")
    code = (
        "import sys\nfrom dovetail.cli import main\ntry:\n    main(sys.argv[1:])\nfinally:\n    print('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code, *args]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (4, "False\n")
    assert len(done.stderr.splitlines()) == 1
