"""Directories made to hurt: each a change to a good one, and what the error must say. Run, it measures memory."""

from __future__ import annotations

import json
import os
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dovetail.base.errors import DovetailError
from dovetail.files.model_dir import INDEX_FILE, WEIGHTS_FILE, save
from dovetail.files.spec import from_yaml
from dovetail.hf.load import load
from dovetail.hf.write import export_directory
from dovetail.model.construction import build

SPEC = from_yaml("""
width: 24
vocab: 62
layers: [{repeat: 2, mixer: {heads: 6, kv_heads: 2, head: 12}, ffn: {hidden: 44}}]
""")
FIRST_SHARD = "model-00001-of-00003.safetensors"
CANARY = "canary"  # a file that appears if anything is ever run


class Bomb:
    """Unpickling it would leave a mark."""

    def __reduce__(self) -> Any:
        return os.mkdir, (CANARY,)


def good(place: Path, shard: int = 2**30) -> Path:
    """A whole directory in Hugging Face layout."""
    save(build(SPEC), SPEC, place / "mine")
    export_directory(place / "mine", place / "theirs", shard=shard)
    (place / "theirs" / "dovetail.yaml").unlink()
    return place / "theirs"


# -- files ----------------------------------------------------------------------------------------------------------


def pickled(name: str) -> Callable[[Path], None]:
    def change(place: Path) -> None:
        (place / WEIGHTS_FILE).unlink()
        torch.save({"model.norm.weight": Bomb()}, place / name)

    return change


def pickled_in_disguise(place: Path) -> None:
    torch.save({"model.norm.weight": Bomb()}, place / WEIGHTS_FILE)


def truncated(keep: int) -> Callable[[Path], None]:
    def change(place: Path) -> None:
        whole = (place / WEIGHTS_FILE).read_bytes()
        (place / WEIGHTS_FILE).write_bytes(whole[:keep])

    return change


def longer(place: Path) -> None:
    with (place / WEIGHTS_FILE).open("ab") as file:
        file.write(b"more")


def length_said(length: int) -> Callable[[Path], None]:
    def change(place: Path) -> None:
        whole = (place / WEIGHTS_FILE).read_bytes()
        (place / WEIGHTS_FILE).write_bytes(struct.pack("<Q", length) + whole[8:])

    return change


def sparse_header(place: Path) -> None:
    """A header of 4 GB that takes no room on the disk."""
    with (place / WEIGHTS_FILE).open("wb") as file:
        file.write(struct.pack("<Q", 2**32))
        file.truncate(2**32 + 100)


def header(edit: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """The same numbers behind another header; the edit may give the text itself."""

    def change(place: Path) -> None:
        whole = (place / WEIGHTS_FILE).read_bytes()
        size = struct.unpack("<Q", whole[:8])[0]
        said = json.loads(whole[8 : 8 + size])
        text = edit(said)
        data = (text if isinstance(text, str) else json.dumps(said)).encode()
        (place / WEIGHTS_FILE).write_bytes(struct.pack("<Q", len(data)) + data + whole[8 + size :])

    return change


def entry(**fields: Any) -> Callable[[Path], None]:
    def edit(said: dict[str, Any]) -> None:
        said["model.norm.weight"].update(fields)

    return header(edit)


def overlapping(said: dict[str, Any]) -> None:
    names = sorted((name for name in said if name != "__metadata__"), key=lambda name: said[name]["data_offsets"])
    same = [name for name in names if said[name]["shape"] == said[names[1]]["shape"]]
    said[same[1]]["data_offsets"] = said[same[0]]["data_offsets"]


def twice(said: dict[str, Any]) -> str:
    return json.dumps(said)[:-1] + ', "model.norm.weight": ' + json.dumps(said["model.norm.weight"]) + "}"


def many_tensors(said: dict[str, Any]) -> None:
    said.update({f"t{i}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(38_000)})


def renamed(said: dict[str, Any]) -> None:
    said["model.norm.weights"] = said.pop("model.norm.weight")


def as_bytes(said: dict[str, Any]) -> None:
    one = said["model.norm.weight"]
    one["dtype"], one["shape"] = "U8", [one["data_offsets"][1] - one["data_offsets"][0]]


def as_whole_numbers(said: dict[str, Any]) -> None:
    said["model.norm.weight"]["dtype"] = "I32"


def turned(said: dict[str, Any]) -> None:
    said["model.layers.0.mlp.down_proj.weight"]["shape"].reverse()


# -- names and links -------------------------------------------------------------------------------------------------


def index(edit: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """Of a directory in several files."""

    def change(place: Path) -> None:
        said = json.loads((place / INDEX_FILE).read_text())
        edit(said)
        (place / INDEX_FILE).write_text(json.dumps(said))

    return change


def all_in(name: Any) -> Callable[[dict[str, Any]], None]:
    def edit(said: dict[str, Any]) -> None:
        said["weight_map"] = dict.fromkeys(said["weight_map"], name)

    return edit


def no_map(said: dict[str, Any]) -> None:
    said["weight_map"] = [1, 2]


def swapped_files(said: dict[str, Any]) -> None:
    names = said["weight_map"]
    one, two = sorted(set(names.values()))[:2]
    said["weight_map"] = {tensor: {one: two, two: one}.get(name, name) for tensor, name in names.items()}


def link(name: str, target: str) -> Callable[[Path], None]:
    def change(place: Path) -> None:
        outside = place.parent / "outside"
        outside.mkdir(exist_ok=True)
        if (place / name).exists():
            (place / name).rename(outside / name)
        (place / name).symlink_to(target)

    return change


def pipe(place: Path) -> None:
    (place / "config.json").unlink()
    os.mkfifo(place / "config.json")


def folder_for_file(place: Path) -> None:
    (place / WEIGHTS_FILE).unlink()
    (place / WEIGHTS_FILE).mkdir()


# -- JSON -----------------------------------------------------------------------------------------------------------


def config(**fields: Any) -> Callable[[Path], None]:
    def change(place: Path) -> None:
        said = json.loads((place / "config.json").read_text())
        (place / "config.json").write_text(json.dumps({**said, **fields}))

    return change


def config_text(text: str | bytes) -> Callable[[Path], None]:
    def change(place: Path) -> None:
        (place / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())

    return change


WHOLE: dict[str, tuple[Callable[[Path], None], str]] = {
    "bin": (pickled("pytorch_model.bin"), "pytorch_model.bin: is a pickle, which can run code"),
    "pt": (pickled("model.pt"), "model.pt: is a pickle"),
    "ckpt": (pickled("last.ckpt"), "convert it to safetensors: python -c"),
    "pickle in disguise": (pickled_in_disguise, "model.safetensors: is a pickle"),
    "no weights": (lambda place: (place / WEIGHTS_FILE).unlink(), "holds no model.safetensors"),
    "empty": (truncated(0), "model.safetensors: is damaged or not a safetensors file (it ends after 0 bytes)"),
    "short": (truncated(7), "it ends after 7 bytes"),
    "half a header": (truncated(100), "does not fit into 100"),
    "last byte": (truncated(-1), "its header describes"),
    "more at the end": (longer, "its header describes"),
    "greatest length": (length_said(2**64 - 1), "a header of 18,446,744,073,709,551,615 bytes does not fit"),
    "sparse header": (sparse_header, "has a header of 4,294,967,296 bytes; more than"),
    "no length": (length_said(0), "model.safetensors: is not JSON"),
    "list for header": (header(lambda said: "[]"), "is not a JSON object"),
    "unknown dtype": (entry(dtype="F4"), "model.norm.weight has dtype 'F4'"),
    "dtype of no text": (entry(dtype=[1]), "model.norm.weight has dtype [1]"),
    "huge product": (entry(shape=[2**40, 2**40, 2**40]), "its shape needs"),
    "many dimensions": (entry(shape=[1] * 5000), "model.norm.weight has no shape"),
    "negative": (entry(shape=[-24, -1]), "model.norm.weight has no shape"),
    "true for a size": (entry(shape=[True, 24]), "model.norm.weight has no shape"),
    "beyond the end": (entry(data_offsets=[2**50, 2**50 + 96]), "does not begin where"),
    "backwards": (entry(data_offsets=[96, 0]), "takes -96 bytes"),
    "three offsets": (entry(data_offsets=[0, 1, 2]), "has no two offsets"),
    "further keys": (entry(code="x"), "is not described by dtype, shape and data_offsets"),
    "overlap": (header(overlapping), "does not begin where the tensor before it ends"),
    "twice": (header(twice), "'model.norm.weight' is given twice"),
    "many tensors": (header(many_tensors), "has no place in this spec"),
    "metadata": (header(lambda said: said.update(__metadata__={"a": [1]})), "its metadata are not strings"),
    "missing": (header(renamed), "model.norm.weight: is missing"),
    "bytes for numbers": (header(as_bytes), "model.norm.weight: has shape (96,), not (24,)"),
    "whole numbers": (header(as_whole_numbers), "norm.scale holds torch.int32"),
    "turned": (header(turned), "model.layers.0.mlp.down_proj.weight: has shape (44, 24), not (24, 44)"),
    "config elsewhere": (link("config.json", "../outside/config.json"), "config.json: is a link out of the directory"),
    "weights elsewhere": (link(WEIGHTS_FILE, "../outside/model.safetensors"), "model.safetensors: is a link out"),
    "spec elsewhere": (link("dovetail.yaml", "/etc/hostname"), "dovetail.yaml: is a link out of the directory"),
    "endless": (link(WEIGHTS_FILE, "/dev/zero"), "model.safetensors: is a link out of the directory"),
    "link to itself": (link("dovetail.yaml", "dovetail.yaml"), "dovetail.yaml: a dangling link"),
    "pipe": (pipe, "config.json: is not a regular file"),
    "folder for file": (folder_for_file, "model.safetensors: is not a regular file"),
    "auto_map": (config(auto_map={"AutoModel": "modeling.Evil"}), "config.json: auto_map names code to be run"),
    "code by field": (config(custom_pipelines={"a": "b"}), "config.json: custom_pipelines: is not a known field of llama"),
    "adapter": (config(quantization_config={"a": 1}), "config.json: quantization_config"),
    "model type": (config(model_type="../../evil"), "config.json: model_type: '../../evil' is not a known family"),
    "layers": (config(num_hidden_layers=10**9), "config.json: num_hidden_layers: 1000000000 is not a whole number from 1 to"),
    "vocabulary": (config(vocab_size=2**31 - 1), "the spec asks for"),
    "vocabulary beyond any": (config(vocab_size=10**12), "vocab: 1000000000000 is beyond the limit of 2,147,483,647"),
    "width": (config(hidden_size=6 * 10**12), "width: 6000000000000 is beyond the limit"),
    "hidden": (config(intermediate_size=2**31 - 1), "the spec asks for"),
    "hidden beyond any": (config(intermediate_size=2**52), "ffn.hidden: 4503599627370496 is beyond the limit"),
    "beyond": (config(vocab_size=2**60), "config.json: vocab_size is 1152921504606846976; no size"),
    "text": (config(hidden_size="24"), "config.json: hidden_size: '24' is not a whole number"),
    "true": (config(hidden_size=True), "config.json: hidden_size: True is not a whole number"),
    "part of one": (config(hidden_size=24.5), "config.json: hidden_size: 24.5 is not a whole number"),
    "none": (config(num_attention_heads=0), "config.json: "),
    "below none": (config(num_key_value_heads=-2), "config.json: "),
    "nan": (config(rms_norm_eps=float("nan")), "config.json: is not JSON (NaN is not a number)"),
    "unlike heads": (config(num_key_value_heads=4), "config.json: layers.0.mixer.kv_heads: 4 does not divide 6"),
    "long text": (config(hidden_act="a" * 10**6), "config.json: hidden_act: 'aaaa"),
    "deep": (config_text('{"a":' + "[" * 5000 + "]" * 5000 + "}"), "is nested deeper than 40 levels"),
    "very deep": (config_text('{"a":' * 200_000 + "1" + "}" * 200_000), "is nested deeper than 40 levels"),
    "many items": (config_text('{"a":[' + "[]," * 700_000 + "0]}"), "holds more than 500,000 items"),
    "some items": (config(a=[{}] * 240_000), "config.json: a: is not a known field"),
    "large": (config_text(b" " * (2**22 + 1)), "config.json: has 4,194,305 bytes"),
    "long number": (config_text('{"vocab_size": ' + "9" * 100_000 + "}"), "config.json: is not JSON"),
    "same key": (config_text('{"model_type": "llama", "model_type": "gpt2"}'), "'model_type' is given twice"),
    "no text": (config_text(b"\xff\xfe\x00"), "config.json: is not JSON"),
    "no object": (config_text("[1, 2]"), "config.json: is not a JSON object"),
    "nothing": (config_text(""), "config.json: is not JSON"),
}  # fmt: skip
SHARDED: dict[str, tuple[Callable[[Path], None], str]] = {
    "path up": (index(all_in("../outside/model.safetensors")), "'../outside/model.safetensors' is a path"),
    "absolute": (index(all_in("/etc/evil.safetensors")), "'/etc/evil.safetensors' is a path"),
    "backslash": (index(all_in("..\\evil.safetensors")), "is a path, not the name of a file"),
    "pickle in the index": (index(all_in("pytorch_model.bin")), "names no file of safetensors"),
    "number for a name": (index(all_in(7)), "names no file of safetensors"),
    "no map": (index(no_map), "model.safetensors.index.json: weight_map is not a mapping"),
    "not there": (index(all_in("model-9.safetensors")), "model-9.safetensors: no such file"),
    "other file": (index(swapped_files), "is not in model-0000"),
    "shard elsewhere": (link(FIRST_SHARD, f"../outside/{FIRST_SHARD}"), "is a link out"),
}  # fmt: skip


def refusal(place: Path) -> str:
    """What the error says; AssertionError where there is none."""
    try:
        load(place)
    except DovetailError as error:
        return str(error)
    raise AssertionError("it was loaded")


def status(field: str) -> int:
    """A figure of this process in kB."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def grown(work: Callable[[], object]) -> int:
    """By how many kB the memory of this process went up at most while it worked."""
    with open("/proc/self/clear_refs", "w") as reset:
        reset.write("5")  # the peak so far is forgotten
    before = status("VmRSS")
    work()
    return status("VmHWM") - before


def main(places: list[str]) -> None:
    """Try a good directory to warm up, then each of the others under measure; one line of JSON."""
    load(places[0])
    print(json.dumps({place: grown(lambda place=place: refusal(Path(place))) for place in places[1:]}))


if __name__ == "__main__":
    main(sys.argv[1:])
