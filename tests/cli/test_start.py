"""The command line from outside: what answers without torch, how soon, with which exit code, and what an error says."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dovetail import __version__
from dovetail.cli import VERBS, main
from dovetail.cli.command import command_of

LOADED = """
import sys
from dovetail.cli import main
try:
    main(sys.argv[1:])
finally:
    print("torch" in sys.modules, file=sys.stderr)
"""
SOON = 1.5  # seconds at the worst, on a machine with other work; 0.5 on a quiet core
BROKEN = "width: 28\nlayers: [\n"


def run(*args: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dovetail", *args]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=120, check=False)


def watched(*args: str) -> subprocess.CompletedProcess[str]:
    """The same; the last line on stderr says whether torch was imported."""
    command = [sys.executable, "-c", LOADED, *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture
def broken(tmp_path: Path) -> str:
    path = tmp_path / "broken.yaml"
    path.write_text(BROKEN)
    return str(path)


# -- without torch, and soon


@pytest.mark.parametrize("args", [["--help"], ["--version"], [], ["nonsense"]])
def test_answers_without_torch(args: list[str]) -> None:
    assert watched(*args).stderr.splitlines()[-1] == "False"


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_a_verb_needs_no_torch_and_begins_with_what_it_does(verb: str) -> None:
    done = watched(*verb.split(), "--help")
    assert (done.returncode, done.stderr.splitlines()[-1]) == (0, "False")
    assert done.stdout.startswith(f"usage: dovetail {verb}")
    first = command_of(verb).about.splitlines()[0]
    assert " ".join(first.split()[:5]) in " ".join(done.stdout.split())


def test_a_syntax_error_is_answered_without_torch(broken: str) -> None:
    for verb in ("show", "laws"):
        done = watched(verb, broken)
        assert done.returncode == 3
        assert "broken.yaml line 3, column 1: not YAML" in done.stderr
        assert done.stderr.splitlines()[-1] == "False"


@pytest.mark.slow
def test_the_watch_on_torch_can_see_it() -> None:
    done = watched("show", "llama-tiny")
    assert (done.returncode, done.stderr.splitlines()[-1]) == (0, "True")


@pytest.mark.parametrize("args", [["--help"], ["--version"], ["show", "--help"]])
def test_answers_soon(args: list[str]) -> None:
    best = float("inf")
    for _ in range(5):
        begin = time.perf_counter()
        run(*args)
        best = min(best, time.perf_counter() - begin)
    assert best < SOON


# -- what is printed


def test_help_names_every_verb_and_exit_code() -> None:
    done = run("--help")
    assert done.returncode == 0
    for verb, declared in VERBS.items():
        assert f"{verb} " in done.stdout
        assert declared.summary in done.stdout
    assert "1 a law fails, 2 usage, 3 spec, 4 data or file, 5 diverged" in done.stdout


def test_version() -> None:
    assert run("--version").stdout == f"dovetail {__version__}\n"


# -- errors: where, what, what to do; and an exit code a script can tell apart


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        ([], 2, ["usage: dovetail VERB"]),
        (["nonsense"], 2, ["unknown verb 'nonsense'", ", ".join(VERBS)]),
        (["sho"], 2, ["unknown verb 'sho'; did you mean show?"]),
        (["data"], 2, ["data: a second word is missing; verbs: build, show"]),
        (["data", "bild"], 2, ["unknown verb 'data bild'; did you mean build?"]),
        (["show"], 2, ["dovetail show --help"]),
        (["show", "llama-tiny", "--lenght", "3"], 2, ["unknown flag --lenght; did you mean --length?"]),
        (["show", "llama-tiny", "--length", "x"], 2, ["--length: 'x' is not a whole number"]),
        (
            ["show", "llama-tiny", "--set", "layers.0.mixer.kv_heads=3"],
            3,
            ["layers.0.mixer.kv_heads: 3 does not divide 8 heads"],
        ),
        (
            ["show", "llama-tiny", "--set", "layers.0.mixer.heads=eight"],
            3,
            ["layers.0.mixer.heads: 'eight' is not a whole number"],
        ),
        (
            ["show", "llama-tiny", "--set", "layers.0.mixer.hedas=8"],
            3,
            ["layers.0.mixer.hedas: no field of layers.0.mixer matches 'hedas'", "did you mean heads or"],
        ),
        (["show", "llama-tiny", "--set", "width"], 3, ["--set takes path=value, not 'width'"]),
        (["show", "llama-tiny", "--swap", "position=ropes"], 3, ["no part is called 'ropes'", "did you mean rope?"]),
        (["show", "llama-tiny", "--swap", "position=xyz"], 3, ["no part is called 'xyz'", "kinds: alibi, learned"]),
        (["show", "llama-tiny", "--swap", "heads=4"], 3, ["heads: is a field", "--set 'layers.*.mixer.heads=4'"]),
        (["show", "llama-tiny", "--swap", "postion=rope"], 3, ["postion: is not a group of parts", "did you mean position?"]),
        (["show", "llama-tiny", "--swap", "color=rope"], 3, ["color: is not a group of parts", "groups: mixer, position"]),
        (["show", "no-such-model"], 4, ["no-such-model: no such file, directory or preset", "llama-3-8b"]),
        (["show", "lama-tiny"], 4, ["lama-tiny: no such file, directory or preset; did you mean llama-tiny"]),
        (["generate", "llama-tiny", "Once"], 4, ["llama-tiny: is a preset", "dovetail train llama-tiny --text FILE"]),
        (["show", "a" * 300], 4, ["File name too long"]),
        (["show", "spec\0.yaml"], 2, ["holds a NUL character"]),
        (["diff", "llama-tiny", "nowhere/spec.yaml"], 4, ["nowhere/spec.yaml: no such file"]),
        (["train", "llama-tiny", "--text", "nowhere.txt"], 4, ["nowhere.txt: cannot be read"]),
        (["map", "nowhere", "a text"], 4, ["nowhere: no such directory"]),
    ],
)
def test_an_error_says_where_what_and_what_to_do(
    args: list[str],
    code: int,
    said: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(args)
    assert ended.value.code == code
    out, err = capsys.readouterr()
    assert (out if args else err) == ""
    for text in said:
        assert text in (err if args else out)


def test_a_typo_in_a_file_is_named_by_its_path(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text("width: 28\nlayers: [{mixer: {heads: 2}}, {mixer: {headz: 2}}]\n")
    done = run("show", "spec.yaml", cwd=tmp_path)
    assert done.returncode == 3
    assert done.stderr.startswith("dovetail: layers.1.mixer.headz: attention has no such field (did you mean head or heads")


# -- a reader that has had enough


@pytest.mark.skipif(os.name != "posix", reason="pipes as POSIX has them")
@pytest.mark.parametrize("args", [["--help"], ["show", "--help"]])
def test_a_closed_pipe_is_no_error(args: list[str]) -> None:
    read, write = os.pipe()
    os.close(read)  # closed before a byte is written
    done = subprocess.run(
        [sys.executable, "-m", "dovetail.cli", *args], stdout=write, stderr=subprocess.PIPE, text=True, timeout=60, check=False
    )
    os.close(write)
    assert done.returncode == 0
    assert done.stderr == ""
