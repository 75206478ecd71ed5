"""match: one field value makes two specs equal in parameters, FLOPs or decode state."""

import json
from pathlib import Path
from typing import Any

import pytest

import dovetail as dt
from dovetail.account import Account
from dovetail.base.errors import SpecError
from dovetail.cli import main
from dovetail.spec.fold import parameters

SMALL = dt.load_spec("llama-tiny").set("vocab", 300)


@pytest.mark.parametrize("swap", ["mixer=mamba2", "mixer=gla", "ffn=mlp", "position=alibi"])
@pytest.mark.parametrize("by", ["params", "flops"])
def test_a_swap_is_made_up_for(swap: str, by: Any) -> None:
    found = dt.match(SMALL, SMALL, by=by, swap=swap)
    assert found.equal, str(found)
    other = found.spec or SMALL.swap(*swap.split("="))
    cost = {"params": parameters, "flops": lambda spec: sum(list(Account(spec, 2048, "bf16").flops_per_token.values())[::2])}[
        by
    ]
    assert cost(other) == pytest.approx(cost(SMALL), rel=0.01)


def test_decode_state_is_matched_by_kv_heads() -> None:
    many = SMALL.set("layers.*.mixer.kv_heads", 8)
    found = dt.match(many, SMALL, by="kv", vary="layers.*.mixer.kv_heads")
    assert found.spec == many
    free = dt.match(many, SMALL, by="kv")
    assert free.spec is not None
    assert Account(free.spec, 2048, "bf16").state_bytes(2048) == Account(many, 2048, "bf16").state_bytes(2048)


def test_a_value_is_round_where_that_is_near_enough() -> None:
    found = dt.match(SMALL, SMALL, set="layers.*.mixer.kv_heads=1", vary="layers.*.ffn.hidden")
    assert found.best is not None
    assert found.best.value % 8 == 0
    assert found.best.distance(found.target) <= 0.01


def test_one_that_cannot_be_reached_says_why() -> None:
    found = dt.match(SMALL.set("layers.*.ffn.hidden", 777), SMALL, vary="layers.*.mixer.heads")
    assert not found.equal
    assert found.spec is None
    assert "its legal values are too coarse" in str(found)
    none = dt.match(SMALL, SMALL.set("layers.*.mixer.kv_heads", 1), by="kv", vary="layers.*.ffn.hidden")
    assert "no field of B's layers changes this cost" in str(none)
    with pytest.raises(
        SpecError, match=r"layers\.\*\.ffn\.hiden: is not a whole number.*choose one of .*layers\.\*\.ffn\.hidden"
    ):
        dt.match(SMALL, SMALL, vary="layers.*.ffn.hiden")
    with pytest.raises(SpecError, match="A has no bytes of decode state"):
        dt.match("bert-base", SMALL, by="kv")


def test_the_command_exits_with_1_where_they_differ(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    spec = tmp_path / "small.yaml"
    spec.write_text(dt.to_yaml(SMALL))
    for flags, code in ((["--swap", "ffn=mlp"], 0), (["--set", "layers.*.ffn.hidden=40", "--vary", "layers.*.mixer.heads"], 1)):
        with pytest.raises(SystemExit) as ended:
            main(["match", str(spec), str(spec), "--flops", "--json", *flags])
        assert ended.value.code == code
        data = json.loads(capsys.readouterr().out)
        assert data["equal"] == (code == 0)
    with pytest.raises(SystemExit) as ended:
        main(["match", str(spec), str(spec), "--flops", "--kv"])
    assert ended.value.code == 2
