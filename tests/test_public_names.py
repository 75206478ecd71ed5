"""Public names stay functions and classes whatever is imported, and each can be called.

Python sets an attribute of a package to every submodule that is imported. A room called like a public function would hide it as
soon as anything imports the room, so rooms are nouns and public functions verbs.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import dovetail

VERBS = {
    *("build", "can_serve", "chat", "check", "build_data", "diff", "doctor", "emit", "export", "generate", "graft", "import_"),
    *(
        "laws",
        "load",
        "match",
        "plan",
        "probe",
        "quantize",
        "record",
        "runs",
        "save",
        "serve",
        "serve_vllm",
        "show",
        "tiny",
        "trace",
        "train",
        "tune",
        "verify",
    ),
}

EVERY_SUBMODULE = """
import importlib, pkgutil, tempfile
import dovetail
for module in pkgutil.walk_packages(dovetail.__path__, "dovetail."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
"""

CALLS = """
import tempfile
from pathlib import Path
import torch
spec = dovetail.load_spec("llama-tiny").set("width", 64).set("vocab", 90).set("layers.*.mixer.head", 8)
dovetail.check(spec)
assert dovetail.from_yaml(dovetail.to_yaml(spec)) == spec
model = dovetail.build(spec)
assert isinstance(spec, dovetail.Model)
layout = dovetail.TokenLayout.whole(1, 3)
listener = dovetail.Listener({})
logits = model(torch.tensor([[5, 7, 11]]), dovetail.Ctx(layout=layout, taps=listener))
assert logits.shape == (1, 3, 90)
assert dovetail.Pool(spec, rows=1, capacity=4).bytes() > 0
other = spec.set("layers.*.mixer.kv_heads", 1)
assert dovetail.diff(spec, other).tensors
assert dovetail.match(spec, other).equal
assert dovetail.embed(model, [[5, 7], [11]]).shape == (2, 64)
tokenizer = dovetail.learn_tokenizer("a text", 90, "characters")
assert len(dovetail.sample(dovetail.build(spec, tokenizer=tokenizer), ["a", "te"], choices=3, max_tokens=2)[1]) == 3
assert dovetail.show(spec).parameters > 0
assert "class Model" in dovetail.emit(spec).text
assert dovetail.can_serve(spec, "native") == []
assert dovetail.list_parts("norm")[0].group == "norm"
assert dovetail.check_exercise("2.2", 8.0).right
assert "masks" in [exercise.chapter for exercise in dovetail.list_exercises()]
assert "induction" in [recipe.name for recipe in dovetail.list_recipes()]
assert dovetail.copy_recipe("induction", out=f"{tempfile.mkdtemp()}/recipe.py").out.is_file()
assert dovetail.graft(model, other).model.part == other
assert dovetail.check_node().passed
with tempfile.TemporaryDirectory() as place:
    dovetail.save(model, Path(place) / "model")
    assert dovetail.load(Path(place) / "model").spec == spec
    assert dovetail.export(Path(place) / "model", Path(place) / "hf").model_type == "llama"
    assert dovetail.import_(Path(place) / "hf", Path(place) / "again").layers == 6
    assert dovetail.record("transformers", Path(place) / "hf", out=Path(place) / "dump", length=6, steps=1).passes == 2
    assert not dovetail.verify(model, Path(place) / "again", decode=False, longest=0).failed
    (Path(place) / "text.txt").write_text("a text")
    built = dovetail.build_data(Path(place) / "text.txt", Path(place) / "data", quiet=True)
    assert dovetail.show_data(Path(place) / "data").manifest == built.manifest
    assert dovetail.runs(place).records == ()
    assert dovetail.attach(model, "lora").targeted == 42
    dovetail.save_adapter(model, Path(place) / "adapter")
    assert dovetail.merge(Path(place) / "model", Path(place) / "adapter").leaves == 42
    assert dovetail.quantize(Path(place) / "model", bits=8, speed=False).model.spec == spec
    assert dovetail.tiny("vit", Path(place) / "tiny").model_type == "vit"
    try:
        dovetail.map(Path(place) / "again", "text")
    except dovetail.DovetailError as refused:
        assert "tokenizer" in str(refused)
    effects = dovetail.look.sweeps.Sweep({"layers.0.in[pos=0]": 1.0}, 1.0, 0.0)
    assert dovetail.draw(effects, Path(place) / "effects.html") is None
try:
    dovetail.mup_check(spec, "nowhere.txt")
except dovetail.DovetailError as refused:
    assert "nowhere.txt" in str(refused)
try:
    dovetail.lab({"base": spec, "arms": {"same": {}}, "data": {"text": "nowhere.txt"}, "budget": {"steps": 1}})
except dovetail.DovetailError as refused:
    assert "nowhere.txt" in str(refused)
try:
    dovetail.scaling(tempfile.mkdtemp())
except dovetail.DovetailError as refused:
    assert "no complete run" in str(refused)
try:
    dovetail.train(spec, "nowhere.txt", steps=1)
except dovetail.DovetailError as refused:
    assert "nowhere.txt" in str(refused)
try:
    dovetail.plan(spec, gpus=0)
except dovetail.DovetailError as refused:
    assert "gpus" in str(refused)
assert dovetail.probe(model, task="needle", lengths=[8], rows=1).report.lengths == (8,)
assert dovetail.plan_serving(spec, prompt=8, answer=8).best is not None
try:
    dovetail.tune("nowhere", "nowhere.jsonl")
except dovetail.DovetailError as refused:
    assert "nowhere" in str(refused)
try:
    dovetail.serve("nowhere")
except dovetail.DovetailError as refused:
    assert "nowhere" in str(refused)
try:
    dovetail.serve_vllm("nowhere")
except dovetail.DovetailError as refused:
    assert "dovetail-lm[vllm]" in str(refused)
assert not dovetail.laws(spec, only=["round_trip"]).failed
assert "llama" in [family.model_type for family in dovetail.list_families()]
assert isinstance(model, dovetail.Transformer)
assert isinstance(spec.layers[0], dovetail.Block)
assert isinstance(dovetail.prune_heads(model, {0: [0, 1, 2, 3]}), dovetail.Transformer)
x = torch.randn(2, 5, 8)
assert dovetail.attention(dovetail.rope(x), x, dovetail.layer_norm(x), mask="causal").shape == x.shape
assert torch.allclose(dovetail.attention_weights(x, x).sum(-1), torch.ones(2, 5))
assert dovetail.positions(5, 8).shape == (5, 8)
assert dovetail.scan(torch.ones(3), 0.5).tolist() == [1.0, 1.5, 1.75]
recipe = dovetail.Recipe(lambda setup, seed, fault: ({"figure": (setup, 0.5, None)}, seed), print, full=1, quick=0, faults={})
assert recipe.experiment(recipe.full, 0, None)[0]["figure"][0] == 1
try:
    dovetail.generate(model, "text")
except dovetail.DovetailError as refused:
    assert "tokenizer" in str(refused)
try:
    dovetail.rerank(model, "text", ["text"])
except dovetail.DovetailError as refused:
    assert "tokenizer" in str(refused)
try:
    dovetail.chat(model)
except dovetail.DovetailError as refused:
    assert "tokenizer" in str(refused)
assert issubclass(dovetail.SpecError, dovetail.DovetailError)
"""


@pytest.mark.slow
def test_every_public_name_can_be_called_after_every_submodule_is_imported() -> None:
    done = subprocess.run([sys.executable, "-c", EVERY_SUBMODULE + CALLS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_calls_cover_every_public_name() -> None:
    missing = [name for name in dir(dovetail) if f"dovetail.{name}" not in CALLS and name != "__version__"]
    assert missing == []


def test_no_room_bears_the_name_of_a_public_function() -> None:
    rooms = {module.name for module in pkgutil.iter_modules(dovetail.__path__)}
    assert rooms & (VERBS | set(dir(dovetail))) == set()


def test_no_public_name_is_a_module() -> None:
    importlib.import_module("dovetail.proof.laws.suite")
    assert [name for name in dir(dovetail) if isinstance(getattr(dovetail, name), ModuleType)] == []


def test_a_name_that_is_not_public_is_refused_with_the_nearest() -> None:
    with pytest.raises(AttributeError, match="dovetail has no 'trian'; did you mean train"):
        dovetail.trian  # noqa: B018  # pyright: ignore
    assert not hasattr(dovetail, "__wrapped__")


def test_the_names_that_editors_read_are_those_of_dir_and_of_all() -> None:
    """Editors read the imports for type checkers; each is of the module that defines the name."""
    source = ast.parse(Path(str(dovetail.__file__)).read_text(encoding="utf-8"))
    (block,) = (node for node in source.body if isinstance(node, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom) and node.module != "dovetail"]
    modules = {str(alias.asname): str(node.module) for node in imports for alias in node.names}
    assert sorted(modules) == dovetail.__all__ == [name for name in dir(dovetail) if name != "__version__"]
    for name, module in modules.items():
        assert getattr(dovetail, name).__module__ == module, name


def test_every_name_that_the_pages_use_exists() -> None:
    root = Path(__file__).parents[1]
    pages = [root / "README.md", *(root / "docs").glob("[!u]*.md")]  # not upstream.md, whose `dt` is a step of Mamba
    used = {name for path in pages for name in re.findall(r"\bdt\.(\w+)", path.read_text(encoding="utf-8"))}
    assert len(used) > 30
    assert used - {"parts", "look"} <= set(dovetail.__all__)
