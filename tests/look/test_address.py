from __future__ import annotations

from pathlib import Path

import pytest
from tiny import HYBRID, SPEC

from dovetail.base.errors import SpecError
from dovetail.files.spec import load_spec, zoo
from dovetail.look.address import parse, resolve, suffix
from dovetail.model.model import Model
from dovetail.spec.fold import taps

GOLDEN = Path(__file__).with_name("addresses.txt")


def keys(*texts: str, spec: Model = SPEC) -> list[str]:
    return [target.key for target in resolve(spec, texts)]


def test_a_slice_is_read_and_written() -> None:
    pattern, picks = parse("layers.*.mixer.pattern[head=1|4, query=-1, key=2:5]")
    assert (pattern, picks) == ("layers.*.mixer.pattern", {"head": (1, 4), "query": -1, "key": slice(2, 5)})
    assert suffix(picks) == "[head=1|4, query=-1, key=2:5]"


def test_pos_is_the_axis_of_tokens_that_a_tap_has() -> None:
    assert keys("layers.0.mixer.pattern[pos=3]", "layers.0.mixer.keys[pos=3]", "layers.0.in[pos=3]") == [
        "layers.0.mixer.pattern[query=3]",
        "layers.0.mixer.keys[key=3]",
        "layers.0.in[pos=3]",
    ]
    assert keys("layers.0.mixer.state[pos=3]", spec=HYBRID) == ["layers.0.mixer.state[pos=3]"]


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("blocks.2.hook_resid_pre", "layers.2.in"),
        ("blocks.2.hook_resid_post", "layers.2.after_ffn"),
        ("blocks.0.attn.hook_pattern[head=5]", "layers.0.mixer.pattern[head=5]"),
        ("blocks.1.attn.hook_z", "layers.1.mixer.z"),
        ("blocks.1.ln2.hook_scale", "layers.1.ffn_norm.scale"),
        ("blocks.1.ln2.hook_out", "layers.1.ffn_norm.out"),
        ("blocks.1.attn.hook_rot_q", "layers.1.mixer.q"),
        ("model.layers.2.self_attn", "layers.2.mixer.out"),
        ("transformer.h.0.mlp", "layers.0.ffn.out"),
        ("model.norm", "normed"),
        ("lm_head", "head.logits"),
        ("layers.2.resid", "layers.2.in"),
    ],
)
def test_names_of_other_libraries(theirs: str, ours: str) -> None:
    assert keys(theirs) == [ours]


def test_names_of_all_layers() -> None:
    assert keys("blocks.*.hook_attn_out") == [f"layers.{i}.mixer_add" for i in range(3)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("layers.0.mixer.patern", "did you mean"),
        ("layers.0.mixer.z[had=1]", "its axes are pos, head, channel"),
        ("layers.0.mixer.z[head=x]", "is not an index"),
        ("layers.0.mixer.z[head=1", "a slice is written"),
        ("layers.0.mixer.z[head=1, head=2]", "names head twice"),
        ("blocks.0.hook_nothing", "TransformerLens"),
        ("blocks.0.attn.hook_q", "before the rotation by position, .*: hook_rot_q"),
        ("ln_final.hook_normalized", "before the norm's weight"),
        ("hook_pos_embed", "embedded is the sum"),
        ("blocks.7.hook_resid_pre", "it would be layers.7.in"),
    ],
)
def test_a_wrong_address_says_what_is_right(text: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        resolve(SPEC, [text])


def listed() -> str:
    """The addresses of every preset, those of equal layers once, with their axes."""
    lines: list[str] = []
    for name in sorted(zoo()):
        lines.append(f"{name}")
        once = dict.fromkeys(
            f"  {'.'.join('*' if p.isdigit() else p for p in a.split('.'))}: {x}" for a, x in taps(load_spec(name)).items()
        )
        lines.extend(once)
    return "\n".join(lines) + "\n"


def test_the_addresses_of_every_preset_are_those_that_are_written_down() -> None:
    assert listed() == GOLDEN.read_text(encoding="utf-8"), "an address has changed: people have written it into their programs"
