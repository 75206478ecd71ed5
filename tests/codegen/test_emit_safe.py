"""An emitted file contains no code from untrusted input, and every field of the spec."""

from __future__ import annotations

import ast
import dataclasses as dc
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dovetail.base.errors import SpecError
from dovetail.cli import main
from dovetail.codegen.code import fill, in_docstring, literal
from dovetail.codegen.file import emit
from dovetail.codegen.observe import observed
from dovetail.disk.untrusted import pickle_refusal
from dovetail.files.model_dir import save
from dovetail.files.spec import from_yaml, load_spec
from dovetail.model.model import Model
from dovetail.proof.laws.case import perturbed
from dovetail.spec.part import KINDS, Part

SMALL = """
width: 28
vocab: 62
layers:
- {repeat: 2, mixer: {heads: 6, kv_heads: 2, head: 12}, ffn: {hidden: 44}}
"""
HOSTILE = [
    '"""\nimport os; os.environ["INJECTED"] = "1"\n"""',
    '""" + open("injected", "w").name + """',
    '"',
    'ends with a quote"',
    "'''",
    "ends with a backslash\\",
    "\\",
    '\\"""',
    "\\N{BULLET} \\N{no such name} \\x \\u12 \\777",
    "line\nbreak",
    "carriage\rreturn",
    "\u2028line\u2029separators\x85",
    "\x00null\x1b[2J\x7f",
    "\udc80surrogate",
    "$title $script $imports $notes $letters",
    "# ?\t#? notes",
    "{braces} %s",
    "'; rm -rf ~; '",
]


def without_docstring(text: str) -> tuple[str, str]:
    """The module's docstring, and the dump of everything else."""
    module = ast.parse(text)
    doc = ast.get_docstring(module, clean=False)
    assert doc is not None
    return doc, ast.dump(ast.Module(module.body[1:], []))


@pytest.mark.parametrize("name", HOSTILE)
def test_a_malicious_name_stays_text(name: str) -> None:
    spec = from_yaml(SMALL)
    text = emit(spec, name)
    text.encode()  # a file can hold it
    doc, statements = without_docstring(text)
    assert statements == without_docstring(emit(spec, "benign"))[1]
    assert doc.startswith(f"{name} in plain PyTorch")
    scripts = [line.split() for line in text.splitlines() if line.startswith("    python ")]
    assert all(words[1].removesuffix(".py").replace("_", "").isalnum() for words in scripts)
    assert len(scripts) == 2
    exec(compile(text, "emitted", "exec"), {"__name__": "emitted"})


@pytest.mark.parametrize("name", [name for name in HOSTILE if "/" not in name and "\0" not in name])
def test_a_directory_of_that_name_is_emitted(name: str, tmp_path: Path) -> None:
    spec = from_yaml(SMALL)
    save(perturbed(spec, 1, torch.float32), spec, tmp_path / name)
    with pytest.raises(SystemExit) as left:
        main(["emit", str(tmp_path / name), "-o", str(tmp_path / "out.py")])
    assert not left.value.code
    text = (tmp_path / "out.py").read_text()
    assert without_docstring(text)[1] == without_docstring(emit(spec, "benign"))[1]


@pytest.mark.parametrize("text", HOSTILE)
def test_a_docstring_reads_back_as_the_text(text: str) -> None:
    assert ast.literal_eval(f'"""{in_docstring(text)}"""') == text


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_a_number_that_python_cannot_write_is_refused_with_its_path(value: float) -> None:
    with pytest.raises(SpecError, match="finite"):
        literal(value)
    with pytest.raises(SpecError, match="finite"):
        fill("x = $x", x=value)
    norm = KINDS["rmsnorm"]()
    object.__setattr__(norm, "eps", value)  # the constructor refuses it
    with pytest.raises(SpecError, match="finite") as refused:
        _ = observed(norm, "layers.0.norm").eps
    assert refused.value.path == "layers.0.norm.eps"
    spec = load_spec("llama-tiny")
    with pytest.raises(SpecError) as refused:
        emit(dc.replace(spec, norm=norm))
    assert refused.value.path == "norm.eps"


def test_a_value_that_looks_like_a_placeholder_is_unchanged() -> None:
    assert fill("$a $b", a="$b", b="$a") == "$b $a"


@pytest.mark.parametrize("name", [name for name in HOSTILE if "/" not in name and "\0" not in name] + ["-rf.bin", "a b.bin"])
def test_the_command_that_converts_a_pickle_is_safe_to_paste(name: str, tmp_path: Path) -> None:
    message = pickle_refusal(Path("/models") / name)
    command = message[message.index("python -c") :]
    assert command.isprintable()
    words = shlex.split(command)
    assert words[:2] == ["python", "-c"]
    assert words[3:] == [name if name.isprintable() else "FILE"]
    assert "sys.argv[1]" in words[2]
    ast.parse(words[2])


def test_the_command_that_converts_a_pickle_works(tmp_path: Path) -> None:
    name = 'it\'s $HOME "quoted".bin'
    torch.save({"a": torch.arange(3.0)}, tmp_path / name)
    message = pickle_refusal(tmp_path / name)
    command = message[message.index("python -c") :].replace("python", shlex.quote(sys.executable), 1)
    subprocess.run(["bash", "-c", command], cwd=tmp_path, check=True)
    assert (tmp_path / "model.safetensors").is_file()


# -- fields that a writer does not know -------------------------------------------------------------------------------


def with_more(cls: type[Part], value: float = 2.0) -> type[Part]:
    """A class like `cls` of the same kind with one more field, as if a part had gained it and its writer had not."""
    return dc.make_dataclass("More", [("more", float, value)], bases=(cls,), frozen=True, kw_only=True)


def grown(part: Part) -> Part:
    """The part with one more field."""
    return with_more(type(part))(**{field.name: getattr(part, field.name) for field in dc.fields(part)})


def with_part(spec: Model, **fields: Part) -> Model:
    """The spec with other parts in the fields of its second layer."""
    return dc.replace(spec, layers=(spec.layers[0], dc.replace(spec.layers[1], **fields)))


def test_a_field_that_its_writer_does_not_read_is_refused_with_its_path() -> None:
    spec = from_yaml(SMALL)
    block = spec.layers[1]
    mixer, ffn = block.mixer, block.ffn
    assert mixer is not None
    assert ffn is not None
    cases = {
        "layers.1.mixer.more": with_part(spec, mixer=grown(mixer)),
        "layers.1.ffn.more": with_part(spec, ffn=grown(ffn)),
        "layers.1.ffn.act.more": with_part(spec, ffn=dc.replace(ffn, act=grown(ffn.act))),
        "layers.1.norm.more": with_part(spec, norm=grown(block.norm)),
        "layers.1.wire.more": with_part(spec, wire=grown(block.wire)),
        "layers.1.mixer.position.more": with_part(spec, mixer=dc.replace(mixer, position=grown(mixer.position))),
        "layers.1.mixer.mask.more": with_part(spec, mixer=dc.replace(mixer, mask=grown(mixer.mask))),
        "norm.more": dc.replace(spec, norm=grown(spec.norm)),
        "head.more": dc.replace(spec, head=grown(spec.head)),
        "embed.more": dc.replace(spec, embed=grown(spec.embed)),
    }
    for path, changed in cases.items():
        with pytest.raises(SpecError, match="does not read this field") as refused:
            emit(changed)
        assert refused.value.path == path


def test_a_field_inside_experts_is_refused_too() -> None:
    spec = load_spec("mixtral-tiny")
    ffn = spec.layers[0].ffn
    for path, changed in {
        "layers.0.ffn.more": grown(ffn),
        "layers.0.ffn.router.more": dc.replace(ffn, router=grown(ffn.router)),
        "layers.0.ffn.act.more": dc.replace(ffn, act=grown(ffn.act)),
    }.items():
        layer = dc.replace(spec.layers[0], ffn=changed)
        with pytest.raises(SpecError, match="does not read this field") as refused:
            emit(dc.replace(spec, layers=(layer, *spec.layers[1:])))
        assert refused.value.path == path


def test_the_init_part_changes_no_file() -> None:
    spec = from_yaml(SMALL)
    assert emit(spec.set("init", {"kind": "mup", "base_width": 14})) == emit(spec)
