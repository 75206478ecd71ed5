"""Inputs of the attack on the command line: command lines and the files they read, seeded, each with what must come of it.

Every input is made in a folder of its own, which holds a small model in our layout (`model`), the same in Hugging Face layout
(`hf`), a spec (`spec.yaml`) and a text (`text.txt`). A payload that runs as code creates the file CANARY.
"""

from __future__ import annotations

import dataclasses as dc
import json
import os
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dovetail.base.value import alternatives
from dovetail.cli import VERBS
from dovetail.cli.command import command_of
from dovetail.disk.yaml import dump_yaml
from dovetail.files.model_dir import save
from dovetail.files.spec import from_yaml, to_yaml
from dovetail.model.construction import build
from dovetail.spec.part import KINDS
from dovetail.text.learn import learn

CANARY = "CANARY"
PRECIOUS = "precious.txt"  # a file that no verb may overwrite unasked
EVIL = "x\x1b[2K\x1b]0;own\x07\r\x9b1Adovetail: all is well\u202e"
SPEC = "{dovetail: 1, width: 28, vocab: 280, layers: [{repeat: 2, mixer: {heads: 2, head: 14}, ffn: {hidden: 44}}]}"
TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom.\n" * 200
NUMBERS = [
    "nan",
    "inf",
    "-inf",
    "-1",
    "0",
    "1e308",
    "1e-320",
    str(10**12),
    str(2**64),
    "9" * 5000,
    "0x10",
    "",
    "٣",
    "None",
    "1,000",
]
STRINGS = [EVIL, "a\0b", "\ud800", "x" * 100_000, "", " ", "--", "../../etc/passwd", "🙂", "{}", "[", "%s%n", "$(touch CANARY)"]
VALUES: list[Any] = [-1, 0, 1, 3, 10**12, 2**63, -0.5, 1e308, 1e-320, True, None]
VALUES += ["", "x" * 3000, EVIL, [], {}, [[]], "nan", "inf", ".nan"]

Prepare = Callable[[Path], None]


@dc.dataclass(frozen=True)
class Input:
    """One attack: arguments, the files it needs, and whether exit code 0 would be wrong."""

    name: str
    args: tuple[str, ...]
    prepare: Prepare = lambda folder: None
    must_fail: bool = False
    stdin: bytes = b""


def fixtures(folder: Path) -> None:
    """Write the files that every input may use."""
    from dovetail.api.build_data import build_data
    from dovetail.hf.write import export_directory

    spec = from_yaml(SPEC)
    folder.mkdir(parents=True)
    save(build(spec), spec, folder / "model", {"tokenizer.json": learn(TEXT, 280).to_json()})
    export_directory(folder / "model", folder / "hf")
    (folder / "spec.yaml").write_text(to_yaml(spec))
    (folder / "text.txt").write_text(TEXT)
    build_data(folder / "text.txt", folder / "tokens", workers=1, quiet=True)


BASE: dict[str, tuple[str, ...]] = {
    "show": ("show", "spec.yaml"),
    "parts": ("parts",),
    "diff": ("diff", "spec.yaml", "spec.yaml"),
    "graft": ("graft", "model", "--set", "layers.*.mixer.mask=[causal, {kind: window, size: 8}]"),
    "laws": ("laws", "spec.yaml", "--only", "round_trip"),
    "verify": ("verify", "model", "hf", "--longest", "0", "--no-decode", "--no-why"),
    "train": (
        "train",
        "spec.yaml",
        "--text",
        "text.txt",
        "--steps",
        "2",
        "--minutes",
        "0.02",
        "--sample",
        "2",
        "--length",
        "8",
    ),
    "data build": ("data build", "text.txt", "-o", "out", "--lines", "--workers=1"),
    "data show": ("data show", "tokens"),
    "generate": ("generate", "model", "It was", "--max-tokens", "4"),
    "map": ("map", "model", "It was the best"),
    "import": ("import", "hf", "-o", "out"),
    "export": ("export", "model", "-o", "out"),
    "port": ("port",),
    "emit": ("emit", "spec.yaml"),
    "doctor": ("doctor",),
    "completion": ("completion", "bash"),
}


def flag_inputs() -> Iterator[Input]:
    """Every flag of every verb with every odd value; a positional argument is replaced by it."""
    for verb in VERBS:
        positional = 0
        for name, parameter in command_of(verb).options.items():
            kinds = alternatives(parameter.hint)
            values = NUMBERS if int in kinds or float in kinds else STRINGS
            if bool in kinds:
                values = ["maybe"]
            for i, value in enumerate(values):
                args = list(BASE.get(verb, (verb,)))
                if parameter.option.argument:
                    if positional + 1 < len(args):
                        args[positional + 1] = value
                else:
                    args.append(f"--{name.replace('_', '-')}={value}")
                yield Input(f"{verb} {name} {i}", tuple(args))
            positional += parameter.option.argument
        for i, word in enumerate((*STRINGS[:4], "--nope", "-x", "--json=maybe", "--", "-h=1")):
            yield Input(f"{verb} word {i}", (*BASE.get(verb, (verb,)), word))


PLACES: dict[str, Callable[[Any], dict[str, Any]]] = {
    "mixer": lambda part: {"layers": [{"mixer": part}]},
    "position": lambda part: {"layers": [{"mixer": {"position": part}}]},
    "scaling": lambda part: {"layers": [{"mixer": {"position": {"kind": "rope", "scaling": part}}}]},
    "mask": lambda part: {"layers": [{"mixer": {"mask": part}}]},
    "feature": lambda part: {"layers": [{"mixer": {"kind": "linear_attention", "feature": part}}]},
    "norm": lambda part: {"layers": [{"norm": part}]},
    "wire": lambda part: {"layers": [{"wire": part}]},
    "ffn": lambda part: {"layers": [{"ffn": part}]},
    "router": lambda part: {"layers": [{"ffn": {"kind": "moe", "router": part}}]},
    "act": lambda part: {"layers": [{"ffn": {"act": part}}]},
    "embed": lambda part: {"embed": part},
    "head": lambda part: {"head": part},
    "init": lambda part: {"init": part},
}


def field_inputs() -> Iterator[Input]:
    """Every field of every kind with every odd value, in a spec that `show` or `emit` reads."""
    for kind, part in sorted(KINDS.items()):
        if part.group not in PLACES:
            continue
        for field in dc.fields(part):
            for i, value in enumerate(VALUES):
                data = {"width": 28, "vocab": 62, **PLACES[part.group]({"kind": kind, field.name: value})}
                verb = ("show", "emit")[i % 2]
                yield Input(f"{kind}.{field.name} {i}", (verb, "odd.yaml"), _writes("odd.yaml", dump_yaml(data)))
    for name in ("width", "vocab", "layers", "embed", "head", "norm", "encoder", "dropout", "position", "init", "dovetail"):
        for i, value in enumerate(VALUES):
            data = {"width": 28, "vocab": 62, "layers": [{}], name: value}
            yield Input(f"model.{name} {i}", ("show", "odd.yaml"), _writes("odd.yaml", dump_yaml(data)))


def _writes(name: str, content: str | bytes) -> Prepare:
    def prepare(folder: Path) -> None:
        data = content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)

    return prepare


def yaml_inputs() -> Iterator[Input]:
    """YAML that explodes, nests, repeats, or names code."""
    texts = {
        "keys": "\n".join(f"k{i}: 1" for i in range(400_000)),
        "items": "layers: [" + "1, " * 1_300_000 + "]",
        "repeat": "width: 28\nlayers: [{repeat: 10000}]",
        "repeats": "width: 28\nlayers:\n" + "- {repeat: 10000}\n" * 2000,
        "masks": "width: 28\nlayers: [{mixer: {mask: [" + "causal, " * 20_000 + "causal]}}]",
        "deep": "[" * 100_000,
        "deep maps": "a: {" * 5000,
        "bomb": "a: &a [x, x]\n"
        + "".join(f"{chr(98 + i)}: &{chr(98 + i)} [*{chr(97 + i)}, *{chr(97 + i)}]\n" for i in range(20)),
        "tag": "!!python/object/apply:os.system ['touch CANARY']",
        "tag in": "width: !!python/object/apply:os.system ['touch CANARY']",
        "merge": "<<: {width: 28}\nlayers: [{}]",
        "twice": "width: 28\nwidth: 30",
        "sexagesimal": "width: 1:30\nlayers: [{}]",
        "number": "width: " + "9" * 10_000,
        "nul": "width: \0",
        "controls": f"{json.dumps(EVIL)}: 3",
        "documents": "---\nwidth: 1\n---\nwidth: 2",
        "list": "[1, 2]",
        "string": "hello",
        "empty": "",
        "key list": "[1, 2]: 3",
        "pattern": "width: 28\nlayers: [{repeat: 3, pattern: [a, b], a: {}}]",
        "pattern long": "width: 28\nlayers: [{repeat: 2048, pattern: [" + "a, " * 10_000 + "a], a: {}}]",
        "random": "width: 28\nlayers: [{mixer: {mask: {kind: random_blocks, count: 1000000000000}}}]",
    }
    for name, text in texts.items():
        for verb in ("show", "emit", "laws", "train"):
            args = {"laws": ("laws", "odd.yaml", "--only", "round_trip"), "train": ("train", "odd.yaml", *BASE["train"][2:])}
            yield Input(f"yaml {name} {verb}", args.get(verb, (verb, "odd.yaml")), _writes("odd.yaml", text), must_fail=True)
    for i, raw in enumerate(
        (b"\xff\xfe\x00", b"\xef\xbb\xbfwidth: 28", b"width: \x85 28", "width: \ud800".encode("utf-8", "surrogatepass"))
    ):
        yield Input(f"yaml raw {i}", ("show", "odd.yaml"), _writes("odd.yaml", raw))


def odd_paths() -> dict[str, tuple[str, Prepare]]:
    """Paths that are no plain file or directory."""

    def loop(folder: Path) -> None:
        (folder / "loop").symlink_to("loop")

    def pipe(folder: Path) -> None:
        os.mkfifo(folder / "pipe")

    def linked_pipe(folder: Path) -> None:
        pipe(folder)
        (folder / "link.yaml").symlink_to("pipe")

    def secret(folder: Path) -> None:
        (folder / "locked").write_text("x")
        (folder / "locked").chmod(0)

    def none(folder: Path) -> None:
        return

    return {
        "loop": ("loop", loop),
        "pipe": ("pipe", pipe),
        "linked pipe": ("link.yaml", linked_pipe),
        "locked": ("locked", secret),
        "zero": ("/dev/zero", none),
        "full": ("/dev/full", none),
        "random": ("/dev/urandom", none),
        "stdin": ("/dev/stdin", none),
        "proc": ("/proc/self/mem", none),
        "folder": (".", none),
        "root": ("/", none),
        "long": ("a" * 300, none),
        "longer": ("a/" * 3000, none),
        "dangling": ("dangling", lambda folder: (folder / "dangling").symlink_to("nowhere")),
        "evil": (EVIL.replace("/", ""), none),
        "none": ("nowhere/none", none),
    }


def path_inputs() -> Iterator[Input]:
    """Every path that a verb reads or writes, with every odd path."""
    reads = {
        "show": ("show", "{}"),
        "diff": ("diff", "spec.yaml", "{}"),
        "emit": ("emit", "{}"),
        "laws": ("laws", "{}", "--only", "round_trip"),
        "train spec": ("train", "{}", "--text", "text.txt", "--steps", "1"),
        "train text": ("train", "spec.yaml", "--text", "{}", "--steps", "1"),
        "generate": ("generate", "{}", "hello"),
        "map": ("map", "{}", "hello"),
        "import": ("import", "{}", "-o", "out"),
        "export": ("export", "{}", "-o", "out"),
        "graft": ("graft", "{}", "--set", "width=30"),
        "graft text": (*BASE["graft"], "--text", "{}"),
        "verify": ("verify", "model", "{}"),
        "load": ("show", "spec.yaml", "--load", "{}"),
    }
    writes = {
        "html": ("show", "spec.yaml", "--html", "{}"),
        "diff html": ("diff", "spec.yaml", "spec.yaml", "--html", "{}"),
        "emit out": ("emit", "spec.yaml", "-o", "{}", "--force"),
        "map out": (*BASE["map"], "-o", "{}"),
        "import out": ("import", "hf", "-o", "{}", "--force"),
        "export out": ("export", "model", "-o", "{}", "--force"),
        "train out": (*BASE["train"], "-o", "{}", "--force"),
        "graft out": (*BASE["graft"], "-o", "{}", "--force"),
    }
    for name, (path, prepare) in odd_paths().items():
        for verb, args in reads.items():
            yield Input(f"read {verb} {name}", tuple(a.format(path) if a == "{}" else a for a in args), prepare, must_fail=True)
        for verb, args in writes.items():
            if name in ("none", "evil", "dangling", "locked"):
                continue  # these can be written
            yield Input(
                f"write {verb} {name}",
                tuple(a.format(path) if a == "{}" else a for a in args),
                prepare,
                must_fail=name != "stdin",
            )


def _in_both(name: str, content: str | bytes) -> Prepare:
    def prepare(folder: Path) -> None:
        for place in ("model", "hf"):
            _writes(f"{place}/{name}", content)(folder)

    return prepare


def directory_inputs(rng: random.Random) -> Iterator[Input]:
    """Files of a model directory that are damaged, crafted or huge."""
    readers = {"generate": BASE["generate"], "import": BASE["import"], "export": BASE["export"], "map": BASE["map"]}
    header = json.dumps({"a": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}).encode()
    weights = {
        "empty": b"",
        "short": b"\0" * 7,
        "huge header": struct.pack("<Q", 2**62),
        "header of 100 MB": struct.pack("<Q", 10**8) + b"{",
        "big tensor": struct.pack("<Q", len(header)) + header,
        "no json": struct.pack("<Q", 4) + b"nope",
        "nested": struct.pack("<Q", 200_000) + b"[" * 200_000,
        "negative": (lambda h: struct.pack("<Q", len(h)) + h)(b'{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,-4]}}'),
        "evil name": (lambda h: struct.pack("<Q", len(h)) + h)(
            json.dumps({EVIL: {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}}).encode()
        )
        + b"\0" * 4,
        "garbage": rng.randbytes(5000),
        "pickle": b"\x80\x04cos\nsystem\n(S'touch CANARY'\ntR.",
    }
    for name, data in weights.items():
        for verb, args in readers.items():
            yield Input(f"weights {name} {verb}", args, _in_both("model.safetensors", data), must_fail=True)
    for verb, args in readers.items():
        for i in range(6):
            cut = rng.random()

            def truncate(folder: Path, cut: float = cut, i: int = i) -> None:
                for place in ("model", "hf"):
                    path = folder / place / "model.safetensors"
                    data = bytearray(path.read_bytes())
                    if i % 2:
                        data[rng.randrange(min(len(data), 900))] ^= 255
                        path.write_bytes(data)
                    else:
                        path.write_bytes(data[: int(len(data) * cut)])

            yield Input(f"weights cut {i} {verb}", args, truncate, must_fail=not i % 2)
    configs: dict[str, Any] = {
        "empty": "",
        "list": "[]",
        "deep": "[" * 100_000,
        "nan": '{"model_type": "llama", "hidden_size": NaN}',
        "twice": '{"model_type": "llama", "model_type": "gpt2"}',
        "code": '{"model_type": "llama", "auto_map": {"AutoModel": "evil.Model"}}',
        "unknown": json.dumps({"model_type": EVIL}),
        "huge": '{"model_type": "llama", "hidden_size": 1e400}',
        "keys": "{" + ",".join(f'"k{i}": 1' for i in range(300_000)) + "}",
        "large": "{" + " " * (17 * 2**20) + "}",
        "string": '{"model_type": ["llama"]}',
    }
    for name, text in configs.items():
        for verb, args in (("import", BASE["import"]), ("generate", ("generate", "hf", "hello")), ("show", ("show", "hf"))):
            yield Input(f"config {name} {verb}", args, _writes("hf/config.json", text), must_fail=True)
    for i, value in enumerate(VALUES):
        for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "rms_norm_eps", "rope_theta", "vocab_size"):

            def change(folder: Path, key: str = key, value: Any = value) -> None:
                path = folder / "hf" / "config.json"
                path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))

            yield Input(f"config {key} {i}", (("show", "hf"), BASE["import"])[i % 2], change)


def tokenizer_inputs() -> Iterator[Input]:
    """Tokenizers and chat templates that nest, loop, panic or run code."""

    def changed(**changes: Any) -> Prepare:
        def prepare(folder: Path) -> None:
            path = folder / "model" / "tokenizer.json"
            path.write_text(json.dumps(json.loads(path.read_text()) | changes))

        return prepare

    nested: Any = {"type": "Lowercase"}
    for _ in range(60):
        nested = {"type": "Sequence", "normalizers": [nested]}
    single = [{"SpecialToken": {"id": "s", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]

    def post(n: int) -> dict[str, Any]:
        special = {"s": {"id": "s", "ids": [0] * n, "tokens": ["s"] * n}}
        return {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": special}

    crafted: dict[str, Prepare] = {
        "empty": _writes("model/tokenizer.json", ""),
        "garbage": _writes("model/tokenizer.json", os.urandom(0) + bytes(range(256))),
        "deep": _writes("model/tokenizer.json", "[" * 100_000),
        "nested": changed(normalizer=nested),
        "post": changed(post_processor=post(100_000)),
        "post ids": changed(post_processor=post(3) | {"special_tokens": {"s": {"id": "s", "ids": [10**9], "tokens": ["s"]}}}),
        "post missing": changed(post_processor=post(3) | {"special_tokens": {}}),
        "regex": changed(
            pre_tokenizer={"type": "Split", "pattern": {"Regex": "(a+)+b"}, "behavior": "Isolated", "invert": False}
        ),
        "bad regex": changed(
            pre_tokenizer={"type": "Split", "pattern": {"Regex": "(((("}, "behavior": "Isolated", "invert": False}
        ),
        "no model": changed(model=None),
        "other model": changed(model={"type": "WordLevel", "vocab": {}, "unk_token": "none"}),
        "wordpiece": changed(
            model={
                "type": "WordPiece",
                "vocab": {"a": 0},
                "unk_token": "none",
                "continuing_subword_prefix": "##",
                "max_input_chars_per_word": 0,
            }
        ),
        "unigram": changed(model={"type": "Unigram", "vocab": [], "unk_id": 5}),
        "unigram unk": changed(model={"type": "Unigram", "vocab": [["a", 0.0]], "unk_id": 5}),
        "high ids": changed(model={"type": "WordLevel", "vocab": {"a": 4_000_000_000}, "unk_token": "a"}),
        "strip": changed(decoder={"type": "Strip", "content": "a", "start": 10**9, "stop": 10**9}),
        "replace": changed(normalizer={"type": "Replace", "pattern": {"Regex": ".*"}, "content": "x" * 100_000}),
        "grow": changed(
            normalizer={
                "type": "Sequence",
                "normalizers": [{"type": "Replace", "pattern": {"String": "x"}, "content": "x" * 100}] * 6,
            }
        ),
        "prepend": changed(normalizer={"type": "Prepend", "prepend": "y" * 1_000_000}),
        "ctc": changed(decoder={"type": "CTC", "pad_token": "", "word_delimiter_token": "", "cleanup": True}),
        "truncation": changed(truncation={"max_length": 0, "strategy": "LongestFirst", "stride": 5, "direction": "Right"}),
        "evil": changed(
            added_tokens=[
                {
                    "id": 5,
                    "content": EVIL,
                    "single_word": False,
                    "lstrip": False,
                    "rstrip": False,
                    "normalized": False,
                    "special": True,
                }
            ]
        ),
    }
    for name, prepare in crafted.items():
        for verb, args in (
            ("generate", BASE["generate"]),
            ("map", BASE["map"]),
            ("long", ("generate", "model", "x" * 20_000, "--max-tokens", "2")),
        ):
            yield Input(f"tokenizer {name} {verb}", args, prepare)
    templates = {
        "code": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "system": "{{ cycler.__init__.__globals__.os.popen('touch CANARY').read() }}",
        "loop": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "output": "{% for a in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
        "string": "{{ 'x' * 10 ** 10 }}",
        "power": "{{ 9 ** 9 ** 9 }}",
        "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "syntax": "{% if %}",
        "refusal": "{{ raise_exception(" + json.dumps(EVIL) + ") }}",
        "include": "{% include '/etc/passwd' %}",
        "import": "{% import 'os' as os %}",
        "large": "x" * (2 * 2**20),
        "evil": EVIL,
        "empty": "",
    }
    for name, text in templates.items():
        yield Input(f"template {name}", (*BASE["generate"], "--chat"), _writes("model/chat_template.jinja", text))
        config = json.dumps({"chat_template": text})
        yield Input(f"template in config {name}", (*BASE["generate"], "--chat"), _writes("model/tokenizer_config.json", config))


def code_inputs() -> Iterator[Input]:
    """Files that would run code if anything of a model directory were executed."""
    evil = "import os; os.system('touch CANARY')\nopen('CANARY', 'w').write('run')\n"
    for name in (
        "modeling_llama.py",
        "configuration.py",
        "sitecustomize.py",
        "conftest.py",
        "json.py",
        "torch.py",
        "__init__.py",
    ):
        for verb in ("generate", "import", "export", "show"):
            args = ("show", "model") if verb == "show" else BASE[verb]
            yield Input(f"code {name} {verb}", args, _in_both(name, evil))
    for name in ("pytorch_model.bin", "model.pt", "model.ckpt", "training_args.bin"):
        pickle = b"\x80\x04cos\nsystem\n(S'touch CANARY'\ntR."

        def only(folder: Path, name: str = name, pickle: bytes = pickle) -> None:
            _in_both(name, pickle)(folder)
            for place in ("model", "hf"):
                (folder / place / "model.safetensors").unlink()

        for verb in ("generate", "import", "export"):
            yield Input(f"pickle {name} {verb}", BASE[verb], only, must_fail=True)
        yield Input(f"pickle {name} file", ("show", f"model/{name}"), only, must_fail=True)
    for i, name in enumerate(
        (
            "a');import os;os.system('touch CANARY')#",
            '"""\nimport os; os.system("touch CANARY")\n"""',
            "$(touch CANARY)",
            "`touch CANARY`",
        )
    ):

        def renamed(folder: Path, name: str = name) -> None:
            (folder / "model").rename(folder / name.replace("/", "_"))

        yield Input(f"code in name {i}", ("emit", name.replace("/", "_"), "-o", "out.py"), renamed)
        yield Input(
            f"code in name run {i}", ("verify", name.replace("/", "_"), name.replace("/", "_"), "--longest", "0"), renamed
        )

    def outside(folder: Path) -> None:
        (folder / "secret").write_text("{}")
        for place in ("model", "hf"):
            (folder / place / "model.safetensors").unlink()
            (folder / place / "model.safetensors").symlink_to("../secret")

    for verb in ("generate", "import", "export"):
        yield Input(f"link out {verb}", BASE[verb], outside, must_fail=True)
    index = {"metadata": {}, "weight_map": {"a": "../../etc/passwd", "b": "/etc/passwd"}}

    def indexed(folder: Path) -> None:
        for place in ("model", "hf"):
            (folder / place / "model.safetensors").unlink()
            (folder / place / "model.safetensors.index.json").write_text(json.dumps(index))

    for verb in ("generate", "import", "export"):
        yield Input(f"index out {verb}", BASE[verb], indexed, must_fail=True)


def set_inputs() -> Iterator[Input]:
    """--set and --swap with odd paths and values."""
    for i, value in enumerate(
        ("", EVIL, "9" * 5000, "[" * 5000, "{", "!!python/name:os.system", "&a [*a]", "1e400", "nan", "null", "[]", "1:30")
    ):
        for path in (
            "width",
            "layers.*.mixer.heads",
            "layers.0.mixer.position",
            "layers",
            "*",
            "layers.*.*",
            EVIL,
            "a" * 5000,
            ".",
        ):
            yield Input(f"set {path[:12]!r} {i}", ("show", "spec.yaml", "--set", f"{path}={value}"))
        for group in ("position", "mixer", "norm", "heads", EVIL):
            yield Input(f"swap {group[:12]!r} {i}", ("show", "spec.yaml", "--swap", f"{group}={value}"))


def server_inputs(port: int, names: list[str]) -> Iterator[Input]:
    """A server that answers oddly."""
    for name in names:
        url = f"http://127.0.0.1:{port}/{name}"
        yield Input(
            f"server {name}", ("verify", "model", url, "--rows", "1", "--length", "4", "--timeout", "2"), must_fail=True
        )
    for i, url in enumerate(
        (
            "http://",
            "http://[",
            "http://127.0.0.1:99999",
            "http://127.0.0.1:1",
            "http://a b",
            f"http://{EVIL}",
            "https://127.0.0.1:1",
            "http://127.0.0.1:-1",
            "http://" + "a" * 5000,
        )
    ):
        yield Input(f"url {i}", ("verify", "model", url, "--rows", "1", "--length", "4", "--timeout", "2"), must_fail=True)


def every_input(seed: int, port: int, servers: list[str], files: list[Input], most: int = 2700) -> list[Input]:
    """Return a seeded choice of `most` inputs: all from servers, tokenizers, code, YAML and `files`, and a sample of the
    others."""
    rng = random.Random(seed)
    always = [*yaml_inputs(), *tokenizer_inputs(), *code_inputs(), *server_inputs(port, servers), *files]
    others = [*flag_inputs(), *path_inputs(), *directory_inputs(rng), *set_inputs(), *field_inputs()]
    chosen = [*always, *rng.sample(others, most - len(always))]
    rng.shuffle(chosen)
    return chosen
