from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tiny import IDS, MODEL
from torch import Tensor

import dovetail as dt
from dovetail.base.errors import FileError, InputError
from dovetail.look.autoencoder import SAE, load_sae, train_sae

DRAW = torch.Generator().manual_seed(0)
DIRECTIONS = F.normalize(torch.randn(40, 24, generator=DRAW), dim=-1)
ADDRESS = "layers.1.in"


def sparse(rows: int) -> Tensor:
    """Sums of a few of 40 directions in 24 dimensions."""
    active = torch.rand(rows, 40, generator=DRAW) < 0.06
    return (active * (0.5 + torch.rand(rows, 40, generator=DRAW))) @ DIRECTIONS


def found(sae: SAE) -> float:
    """The fraction of the directions that a feature has, by cosine."""
    cosines = DIRECTIONS @ F.normalize(sae.W_dec, dim=-1).T
    return float((cosines.amax(-1) > 0.9).float().mean())


def exact(scale: float = 1.0) -> SAE:
    """An autoencoder that reconstructs everything, or `scale` times it."""
    sae, eye = SAE(ADDRESS, 28, 56, 28).to(torch.float64), torch.eye(28)
    with torch.no_grad():
        sae.W_enc.copy_(torch.cat([eye, -eye], 1))
        sae.W_dec.copy_(scale * torch.cat([eye, -eye]))
    return sae


@pytest.mark.slow
def test_planted_features_are_found() -> None:
    x, seen = sparse(8000), list[tuple[int, int]]()
    sae = train_sae(x, ADDRESS, features=60, k=3, steps=700, batch=256, lr=4e-3, progress=lambda i, n, _: seen.append((i, n)))
    assert found(sae) >= 0.8
    assert float((x - sae(x)).square().sum() / (x - x.mean(0)).square().sum()) < 0.15
    assert float((sae.encode(x) > 0).sum(-1).float().mean()) <= 3
    assert seen[-1] == (700, 700)
    noise = train_sae(torch.randn(8000, 24, generator=DRAW), ADDRESS, features=60, k=3, steps=200, batch=256, lr=3e-3)
    assert found(noise) < 0.4  # without the directions in the data, none is found


def test_a_stream_on_disk_trains_as_a_tensor_does(tmp_path: Path) -> None:
    rows = torch.randint(0, 62, (12, 9), generator=torch.Generator().manual_seed(1))
    dt.look.stream(MODEL, rows, ADDRESS, out=tmp_path, batch=5)
    whole = dt.look.trace(MODEL, rows, ADDRESS)[ADDRESS]
    from_disk, from_memory = (train_sae(source, ADDRESS, features=40, k=4, steps=150, batch=64) for source in (tmp_path, whole))
    torch.testing.assert_close(from_disk.W_dec, from_memory.W_dec, rtol=1e-4, atol=1e-4)
    with pytest.raises(FileError, match=r"holds no activations of layers.2.in; it has those of layers.1.in"):
        train_sae(tmp_path, "layers.2.in", features=40, k=4)
    with pytest.raises(InputError, match="all equal"):
        train_sae(torch.ones(9, 4), ADDRESS, features=8, k=2)
    with pytest.raises(InputError, match="k: 9 of 8 features"):
        train_sae(whole, ADDRESS, features=8, k=9)


def test_loss_recovered_is_one_for_all_and_zero_for_nothing() -> None:
    whole, nothing, half = (exact(scale).measure(MODEL, IDS) for scale in (1.0, 0.0, 0.5))
    assert whole.recovered == pytest.approx(1, abs=1e-9)
    assert whole.explained == pytest.approx(1, abs=1e-9)
    assert whole.l0 == 28
    assert whole.dead <= 2
    assert nothing.recovered == pytest.approx(0, abs=1e-9)
    assert half.explained < 0.9
    own = exact().measure(MODEL, IDS, loss=lambda logits: logits[:, -1, 7].mean())
    assert own.loss == pytest.approx(own.loss_replaced)


def test_steering_adds_the_direction_of_a_feature() -> None:
    patch = exact().steer(30, 2.5)
    steered, plain = (dt.look.trace(MODEL, IDS, ADDRESS, patch=p)[ADDRESS] for p in (patch, None))
    want = torch.zeros(28, dtype=torch.float64)
    want[2] = -2.5
    torch.testing.assert_close(steered - plain, want.expand_as(plain))


def test_it_is_read_as_it_was_written(tmp_path: Path) -> None:
    sae = train_sae(sparse(2000), ADDRESS, features=60, k=3, steps=20)
    sae.save(tmp_path / "sae")
    sae.save(tmp_path / "sae")  # in place of itself
    again = load_sae(tmp_path / "sae")
    assert (again.address, again.k) == (ADDRESS, 3)
    for name, tensor in sae.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name])
    (tmp_path / "other").mkdir()
    with pytest.raises(FileError, match="exists and is not a sparse autoencoder"):
        sae.save(tmp_path / "other")
    config = json.loads((tmp_path / "sae/cfg.json").read_text())
    for name, value, message in (
        ("architecture", "jumprelu", "only 'topk' is read here"),
        ("d_sae", 61, "its tensors are not those"),
        ("d_in", "24", "d_in is '24', not a whole number"),
    ):
        (tmp_path / "sae/cfg.json").write_text(json.dumps({**config, name: value}))
        with pytest.raises(FileError, match=message):
            load_sae(tmp_path / "sae")


def test_units_of_the_length_of_decoder_rows_are_folded(tmp_path: Path) -> None:
    """SAELens trains with activations in units of the length of their feature; what it reconstructs is the same here."""
    sae, x = train_sae(sparse(2000), ADDRESS, features=60, k=3, steps=20), sparse(5)
    want, length = sae(x), 1 + torch.rand(60, generator=DRAW)
    with torch.no_grad():
        sae.W_enc.div_(length)
        sae.b_enc.div_(length)
        sae.W_dec.mul_(length[:, None])
    sae.save(tmp_path / "sae")
    path = tmp_path / "sae/cfg.json"
    path.write_text(path.read_text().replace('"rescale_acts_by_decoder_norm": false', '"rescale_acts_by_decoder_norm": true'))
    torch.testing.assert_close(load_sae(tmp_path / "sae")(x), want)
