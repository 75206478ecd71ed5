"""What a project that people join needs: workflows, forms, policies, citation and container file say what is there."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import shlex
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml

from dovetail import __version__
from dovetail.cli import VERBS

ROOT = Path(__file__).parent.parent
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
FORMS = sorted(path for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml")
PINNED = re.compile(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+")
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def load(path: Path) -> dict[str, Any]:
    """A workflow; YAML 1.1 reads the key `on` as true."""
    data = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert isinstance(data, dict)
    return {"on" if key is True else key: value for key, value in data.items()}


def steps(workflow: dict[str, Any]) -> list[dict[str, Any]]:
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


# -- workflows


def test_workflows_run_our_scripts() -> None:
    runs = {path.stem: [step["run"] for step in steps(load(path)) if "run" in step] for path in WORKFLOWS}
    assert runs["checks"] == ["bash .ci/run"]
    assert runs["full"] == ['bash .ci/full "$STAGE" --to-the-end']
    stages = re.search(r"bash .ci/full ([\w|]+)", read(".ci/full"))
    assert stages
    (path,) = (path for path in WORKFLOWS if path.stem == "full")
    assert load(path)["jobs"]["full"]["strategy"]["matrix"]["stage"] == stages[1].split("|")
    assert runs["wheel"] == ["bash .ci/setup", ".venv/bin/pytest -m slow tests/test_wheel.py"]
    site = re.search(r"say site;\s+(python -m sphinx .*)", read(".ci/run"))
    assert site
    assert runs["site"] == ["bash .ci/setup", f".venv/bin/{site[1]}"]
    assert load(WORKFLOWS[0])["on"].keys() == {"push", "pull_request"}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_has_little_power(path: Path) -> None:
    text, workflow = path.read_text(encoding="utf-8"), load(path)
    assert "never executed" in text.partition("\n")[0]
    assert workflow["permissions"] == {"contents": "read"}
    assert "pull_request_target" not in workflow["on"]
    assert "secrets." not in text
    for name, job in workflow["jobs"].items():
        assert job["timeout-minutes"] <= 330
        assert job["runs-on"] == "ubuntu-24.04"
        assert job.get("permissions", {}).keys() <= (
            {"pages", "id-token"} if (path.stem, name) == ("site", "publish") else set()
        )
    for step in steps(workflow):
        assert "${{" not in step.get("run", ""), "an expression in a script can be code of another"
        if step.get("uses", "").startswith("actions/checkout@"):
            assert step["with"] == {"persist-credentials": False}
        if ".ci/" in step.get("run", ""):
            assert {name: value for name, value in step["env"].items() if name != "STAGE"} == {"TORCH_INDEX": TORCH_INDEX}


@pytest.mark.parametrize("path", [*WORKFLOWS, ROOT / "action.yml"], ids=lambda path: path.stem)
def test_actions_are_pinned_by_commit(path: Path) -> None:
    uses = re.findall(r"uses: (.*)", path.read_text(encoding="utf-8"))
    assert uses
    assert [name for name in uses if not PINNED.fullmatch(name)] == []


def test_a_tag_is_no_pin() -> None:
    assert not PINNED.fullmatch("actions/checkout@v6")
    assert not PINNED.fullmatch("actions/checkout@de0fac2e4500dabe0009e67214ff5f5447ce83dd")


def test_torch_is_installed_first_from_the_named_index() -> None:
    installs = [line for line in read(".ci/setup").splitlines() if line.startswith("pip install")]
    assert installs[0] == 'pip install -q torch==2.13.0 ${TORCH_INDEX:+--index-url "$TORCH_INDEX"}'


# -- forms


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_a_form_is_valid(path: Path) -> None:
    form = load(path)
    assert set(form) == {"name", "description", "labels", "body"}
    kinds = {"markdown": {"value"}, "input": {"label"}, "textarea": {"label"}, "checkboxes": {"label", "options"}}
    ids = [field["id"] for field in form["body"] if field["type"] != "markdown"]
    assert len(ids) == len(set(ids)) > 0
    for field in form["body"]:
        assert kinds[field["type"]] <= field["attributes"].keys()
    assert any(field.get("validations", {}).get("required") for field in form["body"])


def test_forms_ask_for_what_a_report_needs() -> None:
    assert [path.stem for path in FORMS] == ["bug", "family", "feature"]
    fields = {field["id"]: field for field in load(FORMS[0])["body"] if "id" in field}
    for name in ("doctor", "spec", "repeat"):
        assert fields[name]["validations"] == {"required": True}
    for path in FORMS:
        for verb in re.findall(r"`dovetail (\w+)", path.read_text(encoding="utf-8")):
            assert verb in VERBS
    from dovetail.cli.failure import DEBUG

    assert f"`{DEBUG}=1`" in FORMS[0].read_text(encoding="utf-8")


# -- policies


def named_tests(text: str) -> list[tuple[str, str]]:
    return re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)


def test_each_promise_names_tests_that_exist() -> None:
    rows = [line.strip("| ").split(" | ") for line in read("SECURITY.md").splitlines() if line.startswith("| ")]
    promises = [row for row in rows if row != ["promise", "tests"]]
    assert len(promises) >= 15
    for promise, tests in promises:
        assert named_tests(tests), promise
        for path, name in named_tests(tests):
            tree = ast.parse(read(path))
            defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
            assert name in defined, f"{promise}: {path} has no {name}"


def test_a_missing_test_is_noticed() -> None:
    assert named_tests("`tests/files/test_yaml.py::test_a` and `tests/io`") == [("tests/files/test_yaml.py", "test_a")]


@pytest.mark.parametrize("name", ["SECURITY.md", "CODE_OF_CONDUCT.md", ".github/PULL_REQUEST_TEMPLATE.md"])
def test_policies_invent_no_address_and_link_to_what_is_there(name: str) -> None:
    text = read(name)
    assert not re.search(r"[\w.]+@[\w.]+\.\w+", text)
    for target in re.findall(r"\]\(([^)]+)\)", text):
        path, _, anchor = target.partition("#")
        page = ((ROOT / name).parent / path).read_text(encoding="utf-8")
        titles = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in re.findall(r"^#+ (.*)", page, re.M)}
        assert not anchor or anchor in titles, target


def test_the_citation_is_that_of_the_package() -> None:
    citation, project = yaml.safe_load(read("CITATION.cff")), tomllib.loads(read("pyproject.toml"))["project"]
    assert citation["cff-version"] == "1.2.0"
    assert citation["type"] == "software"
    assert citation["version"] == __version__
    assert citation["license"] == project["license"]
    assert citation["keywords"] == project["keywords"]
    assert citation["title"].startswith("Dovetail")
    assert citation["authors"] == [{"name": "The Dovetail authors"}]


# -- the guide, and hooks


def test_the_guide_is_short_and_its_commands_exist() -> None:
    text = read("CONTRIBUTING.md")
    assert len(text.splitlines()) < 100
    for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL):
        for line in block.splitlines():
            program, *args = shlex.split(line, comments=True)
            assert command_exists(program, args), line
    for script in re.findall(r"`(\.ci/\w+)`", text):
        assert (ROOT / script).is_file()


def command_exists(program: str, args: list[str]) -> bool:
    """Whether a line of the guide names a verb, a test file or a script that is there."""
    if program == "dovetail":
        return args[0] in VERBS
    if program in ("pytest", "bash"):
        return (ROOT / args[0]).is_file()
    return (program, args[0]) == ("pip", "install")


def test_a_command_that_does_not_exist_is_noticed() -> None:
    assert command_exists("dovetail", ["show"])
    assert not command_exists("dovetail", ["shwo"])
    assert not command_exists("pytest", ["tests/test_nothing.py"])
    assert not command_exists("make", ["all"])


def test_hooks_run_our_commands() -> None:
    config = yaml.safe_load(read(".pre-commit-config.yaml"))
    (repository,) = config["repos"]
    assert repository["repo"] == "local"
    checks = read(".ci/run") + "pytest"
    for hook in repository["hooks"]:
        assert hook["language"] == "system"
        program, *args = shlex.split(hook["entry"])
        if program == "pytest":
            files = [arg for arg in args if arg.startswith("tests/")]
            assert files
            assert all((ROOT / file).is_file() for file in files)
        else:
            assert " ".join([program, *args]).removesuffix(" --force-exclude").removesuffix(" --check") in checks


# -- the container file


def instructions() -> list[tuple[str, str]]:
    """(instruction, arguments) of the container file, with continued lines joined."""
    lines = [line for line in read("deploy/Containerfile").splitlines() if line and not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ").splitlines()
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in joined)]


def arguments(name: str) -> list[str]:
    return [" ".join(rest.split()) for found, rest in instructions() if found == name]


def problems(lines: list[tuple[str, str]]) -> list[str]:
    """What a container file may not have."""
    images = [rest.split()[0] for name, rest in lines if name == "FROM"]
    values = dict(rest.split("=", 1) for name, rest in lines if name == "ARG" and "=" in rest)
    images = [re.sub(r"\$\{(\w+)\}", lambda match: values.get(match[1], ""), image) for image in images]
    users = [rest for name, rest in lines if name == "USER"]
    wrong = [f"{image}: no version" for image in images if not re.search(r":\d+\.\d+\.\d+[\w.-]*$", image)]
    wrong += [f"{user}: root, or a name" for user in users if not re.fullmatch(r"[1-9]\d*:[1-9]\d*", user)]
    wrong += [] if users else ["no USER"]
    wrong += [f"{rest}: of the network" for name, rest in lines if name == "ADD"]
    after = lines[max((i for i, (name, _) in enumerate(lines) if name == "USER"), default=0) :]
    return wrong + [f"{name}: after USER" for name, _ in after if name in ("RUN", "COPY")]


def test_the_container_runs_as_a_plain_user_on_a_named_image() -> None:
    assert problems(instructions()) == []
    security = read("deploy/kubernetes/serve.yaml")
    user, group = arguments("USER")[0].split(":")
    assert f"runAsUser: {user}" in security
    assert f"runAsGroup: {group}" in security


@pytest.mark.parametrize(
    ("lines", "wrong"),
    [
        ([("FROM", "python:latest"), ("USER", "1:1")], ["python:latest: no version"]),
        ([("FROM", "python"), ("USER", "1:1")], ["python: no version"]),
        ([("FROM", "python:3.11.14-slim"), ("USER", "root")], ["root: root, or a name"]),
        ([("FROM", "python:3.11.14-slim"), ("USER", "0:0")], ["0:0: root, or a name"]),
        ([("FROM", "python:3.11.14-slim")], ["no USER"]),
        ([("ARG", "V=3.11.14"), ("FROM", "python:${V}"), ("USER", "1:1"), ("RUN", "x")], ["RUN: after USER"]),
    ],
)
def test_a_weak_container_file_is_noticed(lines: list[tuple[str, str]], wrong: list[str]) -> None:
    assert problems(lines) == wrong


def test_the_container_installs_torch_first_and_answers_its_probe() -> None:
    runs = [run for run in arguments("RUN") if "pip install" in run]
    assert runs[0] == 'pip install --no-cache-dir --index-url "${TORCH_INDEX}" "torch==${TORCH}"'
    assert f"TORCH_INDEX={TORCH_INDEX}" in arguments("ARG")
    assert f"torch=={dict(arg.split('=') for arg in arguments('ARG'))['TORCH']}" == "torch==2.13.0"
    assert "[serve,grammar]" in runs[1]
    assert "pip check" in runs[1]
    (probe,) = arguments("HEALTHCHECK")
    (port,) = arguments("EXPOSE")
    assert f"http://127.0.0.1:{port}/health" in probe
    assert arguments("ENTRYPOINT") == ['["dovetail", "serve"]']
    assert "PYTHONSAFEPATH=1" in arguments("ENV")[0]
    shown = read("deploy/Containerfile").partition("\nARG")[0]
    assert all(flag in shown for flag in ("--read-only", "--cap-drop ALL", "no-new-privileges", "--api-key-file"))


def test_the_context_of_the_container_is_what_it_copies() -> None:
    rules = [line for line in read(".dockerignore").splitlines() if line and not line.startswith("#")]
    assert rules[0] == "*"
    kept = {rule[1:] for rule in rules if rule.startswith("!")}
    first = instructions()[: next(i for i, (name, _) in enumerate(instructions()) if name == "RUN")]
    copied = {source.rstrip("/") for name, rest in first if name == "COPY" for source in rest.split()[:-1]}
    assert copied == kept
    assert not any(fnmatch(".git", name) for name in kept)


def imported_names(path: Path) -> set[tuple[str, str]]:
    """(module of this package, name) of each import in a file."""
    nodes = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.ImportFrom)]
    return {
        (node.module, alias.name)
        for node in nodes
        if node.module and node.module.startswith("dovetail")
        for alias in node.names
    }


@pytest.mark.parametrize("folder", ["benchmarks", "checks", "deploy", "docs"])
def test_what_files_beside_the_package_import_is_there(folder: str) -> None:
    """Files that need a peer, such as Ray, are imported by no other test."""
    names = set[tuple[str, str]]().union(*(imported_names(path) for path in (ROOT / folder).rglob("*.py")))
    assert names, "files of this folder use the package"
    for module, name in sorted(names):
        there = name in dir(importlib.import_module(module)) or importlib.util.find_spec(f"{module}.{name}") is not None
        assert there, f"{folder}: {module} has no {name}"
