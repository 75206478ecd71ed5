"""An emitted file: bit-equal outputs in its own process, formatted, short, importing only torch and the standard library."""

from __future__ import annotations

import ast
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dovetail.base.errors import SpecError
from dovetail.codegen.file import emit
from dovetail.codegen.registry import WRITERS
from dovetail.disk.tensors import write_tensors
from dovetail.files.model_dir import save
from dovetail.files.spec import from_yaml, load_spec, zoo
from dovetail.model.construction import generator
from dovetail.model.model import Model, ModelModule
from dovetail.nn.ctx import Ctx
from dovetail.nn.layout import TokenLayout
from dovetail.nn.module import tensor_at
from dovetail.proof.laws.case import Case, perturbed
from dovetail.proof.laws.sample import attempt
from dovetail.spec.fold import declared
from dovetail.spec.part import KINDS, walk_spec
from dovetail.spec.scope import Scope

ALONE = ("gpt2-tiny", "bert-tiny", "t5-tiny", "vit-tiny", "mixtral-tiny", "mamba2-tiny")
LINES = {"llama-tiny": 200, "gpt2-tiny": 200, "bert-tiny": 200, "vit-tiny": 200, "mamba2-tiny": 215, "mixtral-tiny": 260}
OWN = {"json", "math", "sys", "collections", "pathlib", "torch"}  # what an emitted file may import
SIZES = ((1, 5), (3, 21), (2, 47))

SMALL = """
width: 28
vocab: 62
layers:
- {repeat: 3, mixer: {heads: 6, kv_heads: 2, head: 12}, ffn: {hidden: 44}}
"""

CHILD = """
import json, runpy, sys
import torch
torch.randn(1, device="meta") * 2  # torch brings what it needs for this only when asked
before = set(sys.modules)
threads, jobs = json.loads(sys.argv[1])
torch.set_num_threads(threads)
for file, weights, inputs, out in jobs:
    space = runpy.run_path(file)
    model = space["load"](weights)
    given = space["read"](space["Path"](inputs))
    # tokens lie in the file as floats, since the reader knows weights alone
    with torch.no_grad():
        answer = model(*(t if t.dim() == 4 else t.long() for _, t in sorted(given.items())))
    open(out, "wb").write(bytes(answer.contiguous().view(torch.uint8).flatten().tolist()))
    sys.argv = [file, weights]
    runpy.run_path(file, run_name="__main__")
ours = {name.partition(".")[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names) - {"torch"}
assert not ours, ours
assert not {"dovetail", "safetensors", "transformers"} & set(sys.modules)
"""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Sums are cut by threads, and small models are no faster with two."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def inputs_of(spec: Model, batch: int, n: int, seed: int) -> list[Tensor]:
    """What an emitted model takes: a source where there is an encoder, then tokens or images."""
    models = [spec] if spec.encoder is None else [spec.encoder, spec]
    return [m.embed.example(m.axes(Scope()), batch, n + 3 * i, generator(seed, str(i))) for i, m in enumerate(models)]


@torch.no_grad()
def ours(model: ModelModule, inputs: list[Tensor]) -> Tensor:
    """Our own answer."""
    *source, x = inputs
    layout = TokenLayout.whole(x.shape[0], x.shape[1])
    if not source:
        return model(x, Ctx(layout=layout))
    encoder_output, encoder_layout = model.encode(source[0], Ctx(layout=TokenLayout.whole(*source[0].shape)))
    return model(x, Ctx(layout=layout, encoder_output=encoder_output, encoder_layout=encoder_layout))


def stored(model: ModelModule, spec: Model) -> dict[str, Tensor]:
    """The weights that a file holds."""
    return {d.path: tensor_at(model, d.path).detach() for d in declared(spec) if d.weight.stored}


def unequal(spec: Model, text: str, sizes: tuple[tuple[int, int], ...] = SIZES, seeds: int = 1) -> list[str]:
    """Where the emitted file differs from ours by so much as a bit."""
    space: dict[str, object] = {"__name__": "emitted"}
    exec(compile(text, "emitted", "exec"), space)
    found: list[str] = []
    for dtype in (torch.float32, torch.float64):
        model = perturbed(spec, 1, dtype)
        emitted = space["Model"]().to(dtype).eval()
        emitted.load_state_dict(stored(model, spec))  # strict: every name is the same
        for batch, n in sizes:
            for seed in range(seeds):
                inputs = inputs_of(spec, batch, n, seed)
                with torch.no_grad():
                    got, want = emitted(*inputs), ours(model, inputs)
                if not torch.equal(got, want):
                    found.append(f"{dtype} {batch}x{n}: {(got - want).abs().max().item():.3g}")
    return found


def run_alone(names: tuple[str, ...], folder: Path) -> None:
    """Emit the models, run all of them in one fresh process, and compare what it wrote with ours, bit for bit."""
    jobs: list[list[str]] = []
    wanted: list[Tensor] = []
    for i, name in enumerate(names):
        spec, place = load_spec(name), folder / name
        model = perturbed(spec, 3, (torch.float32, torch.float64)[i % 2])
        save(model, spec, place)
        (folder / f"{name}.py").write_text(emit(spec, name))
        inputs = {str(k): t.to(torch.float64) for k, t in enumerate(inputs_of(spec, 2, 19, 5))}
        write_tensors(folder / f"{name}.in", inputs, inputs.items())
        files = (folder / f"{name}.py", place / "model.safetensors", folder / f"{name}.in", folder / f"{name}.out")
        jobs.append([str(file) for file in files])
        wanted.append(ours(model, inputs_of(spec, 2, 19, 5)))
    told = json.dumps([torch.get_num_threads(), jobs])
    ran = subprocess.run([sys.executable, "-I", "-c", CHILD, told], capture_output=True, text=True, cwd=folder)
    assert ran.returncode == 0, ran.stderr
    for name, (*_, out), want in zip(names, jobs, wanted, strict=True):
        got = torch.frombuffer(bytearray(Path(out).read_bytes()), dtype=want.dtype).view(want.shape)
        assert torch.equal(got, want), name


def clean(folder: Path) -> str:
    """What a formatter would change, and lines that are too long."""
    length = ["--line-length", "100", "--no-cache", "--isolated"]
    form = subprocess.run([sys.executable, "-m", "ruff", "format", "--diff", *length, folder], capture_output=True, text=True)
    lint = [sys.executable, "-m", "ruff", "check", "--select", "E,F,W,I,B", *length, folder]
    look = subprocess.run(lint, capture_output=True, text=True)
    return form.stdout if form.returncode else look.stdout if look.returncode else ""


def imported(text: str) -> set[str]:
    """The packages a file imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").partition(".")[0])
    return found


@pytest.mark.slow
def test_llama_runs_alone_bit_for_bit(tmp_path: Path) -> None:
    run_alone(("llama-tiny",), tmp_path)


@pytest.mark.slow
def test_the_others_run_alone_bit_for_bit(tmp_path: Path) -> None:
    run_alone(ALONE, tmp_path)


@pytest.mark.parametrize("name", ["llama-tiny", *ALONE])
def test_presets_are_bit_equal(name: str) -> None:
    spec = load_spec(name)
    text = emit(spec, name)
    assert unequal(spec, text, ((3, 21),)) == []
    assert imported(text) <= OWN
    assert len(text.splitlines()) <= LINES.get(name, 365)


def test_presets_are_formatted(tmp_path: Path) -> None:
    for name in ("llama-tiny", *ALONE):
        (tmp_path / f"{name.replace('-', '_')}.py").write_text(emit(load_spec(name), name))
    assert clean(tmp_path) == ""


@pytest.mark.slow
def test_every_preset_is_bit_equal_and_formatted_or_names_its_part(tmp_path: Path) -> None:
    refused: dict[str, str] = {}
    for name in zoo():
        spec = load_spec(name)
        try:
            text = emit(spec, name)
        except SpecError as error:
            refused[name] = str(error)
            continue
        (tmp_path / f"{name.replace('-', '_')}.py").write_text(text)
        assert imported(text) <= OWN
        if name.endswith("-tiny"):
            assert unequal(spec, text, seeds=2) == [], name
    assert clean(tmp_path) == ""
    assert all(text.startswith("layers.0.mixer") and "has no writer yet" in text for text in refused.values()), refused


@pytest.mark.parametrize(
    "fields", [{}, {"softcap": 2.0, "sink": True}, {"position": "alibi"}, {"mask": "full", "kv_heads": None}]
)
def test_a_prefix_is_written_for_every_kernel(fields: dict[str, object], tmp_path: Path) -> None:
    spec = from_yaml(SMALL).set("layers.*.mixer.prefix", 3)
    for name, value in fields.items():
        spec = spec.set(f"layers.*.mixer.{name}", value)
    (tmp_path / "prefix.py").write_text(emit(spec, "prefix"))
    assert unequal(spec, (tmp_path / "prefix.py").read_text()) == []
    assert clean(tmp_path) == ""


@pytest.mark.slow
def test_any_sampled_spec_of_written_kinds_is_bit_equal_and_formatted(tmp_path: Path) -> None:
    chance, met, tried = random.Random(7), set(), 0
    among = {kind for kind, part in KINDS.items() if kind in WRITERS or part.group == "init"}
    while tried < 60:
        spec = attempt(chance, {}, among=among)
        if spec is None or any(part.kind not in among for _, part in walk_spec(spec)):
            continue
        try:
            text = emit(spec, f"wiring-{tried}")
        except SpecError:  # two kinds that have a writer each, but none together
            continue
        tried += 1
        met |= {part.kind for _, part in walk_spec(spec)}
        (tmp_path / f"wiring_{tried}.py").write_text(text)
        assert unequal(spec, text, ((3, 21),)) == [], spec.to_data()
    assert clean(tmp_path) == ""
    assert len(met & set(WRITERS)) > 0.8 * len(set(WRITERS) & set(KINDS))


HYBRID = """
width: 28
vocab: 62
layers:
- kind: hybrid_block
  mixer: {heads: 6, kv_heads: 2, head: 12}
  ssm:
    kind: mamba2
    inner: 36
    head: 6
    state_size: 5
    groups: 2
    norm: {kind: rmsnorm, groups: 2, plus_one: true}
    norm_before_gate: true
    multipliers: [0.5, 1.4, 0.7, 1.3, 0.9]
    dt_min: 0.02
    dt_max: 0.9
  ffn: {hidden: 44, gate_multiplier: 0.7}
  mixer_in: 0.6
  mixer_out: 1.3
  ssm_in: 1.5
  ssm_out: 0.7
  ffn_out: 0.8
- {mixer: {kind: mamba2, inner: 60, head: 6, state_size: 5, norm: null}, ffn: {kind: moe, experts: 4, hidden: 20, latent: 16}}
"""


def test_fixed_factors_grouped_norms_and_latent_experts_are_bit_equal(tmp_path: Path) -> None:
    spec = from_yaml(HYBRID)
    text = emit(spec)
    (tmp_path / "hybrid.py").write_text(text)
    assert unequal(spec, text, ((3, 21),)) == []
    assert clean(tmp_path) == ""


def test_a_part_without_a_writer_is_named() -> None:
    spec = from_yaml(SMALL).set("layers.2.mixer", {"kind": "s4"})
    with pytest.raises(SpecError, match="s4 has no writer yet") as error:
        emit(spec)
    assert error.value.path == "layers.2.mixer"


def test_layers_that_differ_get_their_own_parameters() -> None:
    spec = from_yaml(SMALL).set("layers.1.mixer.kv_heads", 3).set("layers.1.ffn.hidden", 36)
    text = emit(spec)
    assert text.count("class Attention") == text.count("class MLP") == text.count("class Block") == 1
    assert all(own in text for own in ("kv_heads=3", "hidden=36"))
    assert unequal(spec, text, ((2, 9),)) == []


def test_it_decodes_as_ours_does() -> None:
    spec = from_yaml(SMALL)
    case = Case(spec, model=perturbed(spec, 2, torch.float32))
    space: dict[str, object] = {"__name__": "emitted"}
    exec(emit(spec), space)
    emitted = space["Model"]()
    emitted.load_state_dict(stored(case.model, spec))
    tokens = case.inputs[:1, :6]
    got = space["generate"](emitted, tokens, 5)
    for n in range(6, 11):
        with torch.no_grad():
            logits = case.model(got[:, :n], Ctx(layout=TokenLayout.whole(1, n)))
        assert logits[0, -1].argmax() == got[0, n]
