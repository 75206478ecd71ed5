"""Nothing is run from the working directory, nothing is overwritten unasked, errors say what to do, and claims hold."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest

import dovetail as dt
from dovetail.api.checks import check_output
from dovetail.base.errors import DISTRIBUTION, FileError, install_command
from dovetail.base.extensions import load_parts
from dovetail.cli import VERBS, main
from dovetail.cli.command import command_of
from dovetail.decoding.generation import Vocabulary
from dovetail.files.spec import to_yaml
from dovetail.proof.compare.engines import engines, interpreter, record_engine
from dovetail.proof.compare.user_code import factory_of
from dovetail.text.learn import learn
from verbs import CODES, LAB, RUNS, STDIN, write_inputs

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src"
# as an installer writes it: processes that are spawned import it under another name
COMMAND = 'import sys\nfrom dovetail.cli import main\nif __name__ == "__main__":\n    sys.exit(main())\n'
PROGRAMS = ("python", "python3", "sh", "git", "gcc", "g++", "cc", "clang", "ninja", "latex", "dvipng", "nvidia-smi", "torchrun")
SETTINGS = {
    "matplotlibrc": "backend: module://canary_backend\ntext.usetex: True\n",
    "pyproject.toml": '[tool.pytest.ini_options]\naddopts = "-p canary_plugin"\n',
    "pytest.ini": "[pytest]\naddopts = -p canary_plugin\n",
    ".env": "PYTHONSTARTUP=canary_startup.py\n",
    "pyvenv.cfg": "home = .\n",
}


SPEC = "{dovetail: 1, width: 28, vocab: 290, layers: [{repeat: 2, mixer: {heads: 2, head: 14}, ffn: {hidden: 44}}]}"


def out_fields(verb: str) -> list[str]:
    """The flags of a verb that name a file or directory to write."""
    return [name for name, parameter in command_of(verb).options.items() if parameter.option.check is check_output]


class Canaries:
    """A folder of files that write their name to a list if they are run."""

    def __init__(self, home: Path) -> None:
        self.folder, self.list, self.command = home / "folder", home / "ran", home / "bin" / "dovetail"
        self.command.parent.mkdir(parents=True)
        self.command.write_text(COMMAND)
        self.list.write_text("")
        self.folder.mkdir()
        packages = {name for name in importlib.metadata.packages_distributions() if name.isidentifier()}
        optional = {"wandb", "ray", "vllm", "tensorboard", "mlx", "mlx_lm", "llama_cpp", "sglang", "tiktoken", "triton"}
        own = {"dovetail", "sitecustomize", "usercustomize", "conftest", "setup", "parts", "canary_backend", "canary_startup"}
        for name in packages | optional | own | set(sys.stdlib_module_names):
            self.add(f"{name}.py")
        for program in (*PROGRAMS, *(f".peers/{name}/bin/python" for name in (*engines(), "llama.cpp"))):
            self.add(program, f"#!/bin/sh\necho {program} >> '{self.list}'\n")
        for name, text in SETTINGS.items():
            (self.folder / name).write_text(text)

    def add(self, name: str, text: str | None = None) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        opened = f"posix.open({str(self.list)!r}, {os.O_WRONLY | os.O_APPEND})"  # a builtin: works before `encodings` is there
        path.write_text(text or f"import posix\nposix.write({opened}, b'{name}\\n')\n")
        path.chmod(0o755)

    def start(self, *args: str, module: bool = False) -> subprocess.Popen[str]:
        """Start the command in the folder."""
        env = {**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1"}
        how = ["-m", "dovetail"] if module else [str(self.command)]
        pipe = subprocess.PIPE
        command = [sys.executable, *how, *args]
        return subprocess.Popen(command, cwd=self.folder, env=env, text=True, stdin=pipe, stdout=pipe, stderr=pipe)

    def run(self, *args: str, module: bool = False) -> tuple[int, str, str]:
        """Run the command in the folder; `serve` until it is ready."""
        child = self.start(*args, module=module)
        if args[0] == "serve":
            assert child.stdout is not None
            child.stdout.readline()
            child.send_signal(signal.SIGTERM)
        out, err = child.communicate(STDIN, timeout=280)
        return child.returncode, out, err

    def ran(self) -> list[str]:
        return self.list.read_text().split()


@pytest.fixture(scope="module")
def canaries(tmp_path_factory: pytest.TempPathFactory) -> Canaries:
    return Canaries(tmp_path_factory.mktemp("canaries"))


# -- B1: nothing is taken from the working directory


def test_b1_the_canaries_run_where_the_folder_is_searched(canaries: Canaries) -> None:
    subprocess.run([sys.executable, "-c", "import yaml, wave"], cwd=canaries.folder, check=False)
    subprocess.run(["./python"], cwd=canaries.folder, check=True)
    assert {"yaml.py", "wave.py", "python"} <= set(canaries.ran())
    canaries.list.write_text("")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_b1_no_verb_runs_a_file_of_the_working_directory(canaries: Canaries) -> None:
    assert set(RUNS) == set(VERBS), "every verb is run"
    write_inputs(canaries.folder)
    for verb, args in RUNS.items():
        code, out, err = canaries.run(*verb.split(), *args)
        assert code == CODES.get(verb, 0), f"{verb}: {err[-2000:]}{out[-500:]}"
        assert canaries.ran() == [], verb
    for more in (
        ["generate", "model", "It was", "--max-tokens=3", "--compiled"],
        ["runs", "model", "--plot", "loss.svg"],
        ["verify", "model", "transformers:exported"],
        ["train", "llama-tiny", "--text", "notes.txt", *RUNS["train"][3:-2], "-o", "logged", "--log", "wandb"],
    ):
        code, out, err = canaries.run(*more)
        assert code == (2 if "wandb" in more else 0), f"{more}: {err[-2000:]}{out[-500:]}"
        assert canaries.ran() == [], more


@pytest.mark.parametrize("engine", [name for name in engines() if name != "transformers"])
def test_b1_an_interpreter_is_named_by_the_user_only(canaries: Canaries, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(canaries.folder)
    monkeypatch.delenv(f"DOVETAIL_{engine.upper()}_PYTHON", raising=False)
    with pytest.raises(FileError, match=f"--python PATH, or DOVETAIL_{engine.upper()}_PYTHON=PATH"):
        interpreter(engine)
    assert interpreter(engine, "python3").parent != canaries.folder, "a bare name is searched in PATH"
    monkeypatch.setenv(f"DOVETAIL_{engine.upper()}_PYTHON", sys.executable)
    assert interpreter(engine) == Path(sys.executable)
    assert interpreter("transformers") == Path(sys.executable)


@pytest.mark.slow
def test_b1_python_m_imports_no_package_from_the_working_directory(tmp_path: Path) -> None:
    found = Canaries(tmp_path)
    for name in (*sys.stdlib_module_names, "dovetail"):  # `python -m` itself imports these before it runs a line of ours
        (found.folder / f"{name}.py").unlink()
    code, out, err = found.run("show", "llama-tiny", module=True)
    assert (code, err, found.ran()) == (0, "", [])
    assert "attention" in out


@pytest.mark.slow
def test_b1_named_code_finds_its_neighbors_and_nothing_else_does(tmp_path: Path) -> None:
    found = Canaries(tmp_path)
    found.add("neighbor.py", "HERE = 1\n")
    found.add("mine.py", "import neighbor, yaml, sys\nassert hasattr(yaml, 'SafeLoader')\n")
    for args in (["--load", "mine.py"], ["--load", "mine"]):
        code, _, err = found.run("show", "llama-tiny", *args)
        assert (code, err, found.ran()) == (0, "", [])
    here = list(sys.path)
    load_parts([str(found.folder / "mine.py")])
    assert sys.path == here


def test_b1_a_name_that_is_installed_and_in_the_working_directory_is_refused(
    canaries: Canaries, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(canaries.folder)
    for name in ("torch", "zipapp", "transformers.models"):
        with pytest.raises(FileError, match=r"installed .*, and the working directory has .*; name the file"):
            load_parts([name])
        with pytest.raises(FileError, match="the working directory has"):
            factory_of(f"{name}:load", "")
    assert canaries.ran() == []


# -- B3: the name on the index


def test_b3_no_line_installs_another_project() -> None:
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    files = [ROOT / name for name in names if Path(name).suffix in (".py", ".md", ".toml", ".yaml", ".yml", ".sh", ".txt", "")]
    wrong = re.compile(r"(?<![\w-])dovetail\[[a-z{]|pip install (-\S+ )*[\"']?dovetail(?![-\w.])")
    assert wrong.search('pip install "dovetail[look]"')
    assert wrong.search("pip install -U dovetail")
    found = [
        path for path in files if path.is_file() and path != Path(__file__) and wrong.search(path.read_text(errors="replace"))
    ]
    assert found == []


def test_b3_messages_name_extras_of_this_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == DISTRIBUTION
    assert install_command("serve", "grammar") == 'pip install "dovetail-lm[serve,grammar]"'
    texts = [path.read_text() for path in SRC.rglob("*.py")] + [path.read_text() for path in (ROOT / "docs").glob("*.md")]
    called = {extra for text in texts for extra in re.findall(r"install_command\('(\w+)'\)", text)}
    written = {
        extra for text in texts for extras in re.findall(rf"{DISTRIBUTION}\[([\w,]+)\]", text) for extra in extras.split(",")
    }
    assert len(called) > 6
    assert called | written <= set(project["optional-dependencies"])


def test_b3_an_engine_without_its_package_is_one_line(tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", with_pip=False)
    (tmp_path / "model").mkdir()
    with pytest.raises(FileError, match=r"has no module \w+; pip install .*dovetail-lm\[hf\].*--python PATH") as refused:
        record_engine(
            "transformers", tmp_path / "model", tmp_path / "out", [[1, 2]], steps=1, python=tmp_path / "bare" / "bin" / "python"
        )
    assert "\n" not in str(refused.value)


# -- B2: nothing is overwritten unasked

OUTPUTS = {(verb, field) for verb in VERBS for field in out_fields(verb)}
ARGS = {
    "lab": ["lab.yaml"],
    "train": ["spec.yaml", "--text", "notes.txt", "--steps=1"],
    "tune": ["model", "--data", "chats.jsonl", "--template", "plain", "--steps=1", "--length=128"],
    "data build": ["notes.txt", "--workers=1"],
    "graft": ["model", "--set=layers.*.mixer.position=alibi"],
    "plan": ["spec.yaml", "--gpus=1"],
    "verify": ["model", "model"],
    "merge": ["model", "model"],
    "import": ["exported"],
    "record": ["transformers", "exported", "--prompt=3 14 15", "--steps=1"],
    "diff": ["spec.yaml", "spec.yaml"],
    "map": ["model", "It was"],
    "runs": ["."],
    "show": ["spec.yaml"],
    "emit": ["spec.yaml"],
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("models")
    write_inputs(home)
    (home / "spec.yaml").write_text(SPEC)
    model = dt.build(dt.from_yaml(SPEC))
    model.vocabulary = Vocabulary(tokenizer=learn("it was the age of wisdom\n" * 20, 290))
    dt.save(model, home / "model")
    dt.export(home / "model", home / "exported")
    return home


@pytest.mark.parametrize(("verb", "field"), sorted(OUTPUTS))
def test_b2_an_existing_file_stays_as_it_is(
    verb: str, field: str, models: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(models)
    (models / "lab.yaml").write_text(LAB)
    path = models / "precious.png"
    path.write_bytes(b"precious")
    with pytest.raises(SystemExit) as ended:
        main([*verb.split(), *ARGS.get(verb, ["model"]), f"--{field.replace('_', '-')}", str(path)])
    shown = capsys.readouterr()
    assert ended.value.code == 4, shown.err
    assert re.search(r"precious.png: (exists|is not a|cannot be written \(File exists)", shown.err), shown.err
    assert path.read_bytes() == b"precious"


def test_b2_force_replaces_a_file_and_the_default_of_map_is_no_exception(
    models: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(models)
    assert ("map", "out") in OUTPUTS
    (models / "map.png").write_bytes(b"precious")
    (models / "page.html").write_bytes(b"precious")
    for args, code in ((["map", "model", "It was"], 4), (["show", "spec.yaml", "--html", "page.html", "--force"], 0)):
        with pytest.raises(SystemExit) as ended:
            main(args)
        assert ended.value.code == code
    assert "map.png: exists already; choose another path, or replace it with --force" in capsys.readouterr().err
    assert (models / "map.png").read_bytes() == b"precious"
    assert (models / "page.html").read_bytes() != b"precious"
    with pytest.raises(FileError, match="exists already"):
        dt.map(models / "model", "It was", out=models / "map.png")
    with pytest.raises(FileError, match="exists already"):
        dt.runs(models, plot=models / "map.png")


# -- E: errors and views say what to do


def run(*args: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(args))
    return int(ended.value.code or 0)


def test_e5_an_adapter_and_an_unfinished_run_say_what_to_do(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, file, message in (
        ("adapter", "adapter.yaml", "is an adapter, not a model; merge it first: dovetail merge adapter -o MERGED"),
        ("peft", "adapter_config.json", "is an adapter, not a model; merge it first: dovetail merge peft -o MERGED"),
        ("run", "run.yaml", "is an unfinished run; resume it with the command that started it, or use its newest checkpoint"),
    ):
        place = tmp_path / name
        place.mkdir()
        (place / "dovetail.yaml").write_text((models / "model" / "dovetail.yaml").read_text())
        (place / file).write_text("{}")
        assert run("verify", str(place), str(models / "model")) == 4
        assert message in capsys.readouterr().err


def test_e6_one_part_and_a_field_of_a_child(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("parts", "moe") == 0
    shown = capsys.readouterr().out
    assert "experts" in shown
    assert "router" in shown
    assert "rope" not in shown
    assert run("parts", "moo") == 3
    assert "did you mean" in capsys.readouterr().err
    assert run("show", "llama-tiny", "--set", "layers.*.ffn={kind: moe, experts: 4, hidden: 8, top_k: 2}") == 3
    assert "it is a field of router: write router: {top_k: …}" in capsys.readouterr().err


def test_e8_what_is_missing_is_named(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("show", "llama-tiny", "--dtype", "int4") == 2
    assert "which quantize writes" in capsys.readouterr().err
    assert run("quantize", str(models / "model"), "--bits", "8", "-o", str(tmp_path / "small")) == 0
    assert "perplexity: not measured; give --text FILE" in capsys.readouterr().out


def test_e9_the_cause_is_the_headline(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other"
    shutil.copytree(models / "model", other)
    text = (other / "dovetail.yaml").read_text()
    (other / "dovetail.yaml").write_text(to_yaml(dt.from_yaml(text).set("layers.*.mixer.position.base", 7777.0)))
    assert run("verify", str(models / "model"), str(other), "--longest", "0") == 1
    lines = capsys.readouterr().out.splitlines()
    (cause,) = [i for i, line in enumerate(lines) if line.startswith("cause: rope base")]
    assert cause < next(i for i, line in enumerate(lines) if line.startswith("structural:"))
    assert "1 candidates" not in lines[cause]
