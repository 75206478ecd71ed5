"""How ranks are laid out, and how a process alone is its own world."""

import pytest
import torch.distributed as dist
from rank_jobs import error_of, mesh_of

from dovetail.parallel import mesh
from dovetail.parallel.mesh import RankError, joined_ranks, make_mesh
from dovetail.parallel.pair import Pair


@pytest.mark.slow
def test_axes_have_names(pair: Pair) -> None:
    assert pair.run(mesh_of, 1, 1, 2) == [("pipeline", "replicas", "data", "sequence", "tensor")] * 2


@pytest.mark.slow
def test_a_box_that_does_not_fit_is_refused(pair: Pair) -> None:
    for name, text in pair.run(error_of, mesh_of, 2, 1, 2):
        assert name == "RankError"
        assert "data 2 × sequence 1 × tensor 2 is not the number of processes, 2" in text


def test_a_process_alone_is_a_world_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with joined_ranks():
        assert dist.get_world_size() == 1
        with joined_ranks():  # who has joined already stays
            assert make_mesh().size() == 1
        assert dist.is_initialized()
    assert not dist.is_initialized()


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(RankError, match="abacus"), joined_ranks("abacus"):
        pass


def test_an_attempt_of_torchrun_does_not_see_the_keys_of_an_earlier_one(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    monkeypatch.setenv("GROUP_WORLD_SIZE", "1")
    for attempt in ("0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        store = mesh._of_attempt(launcher)
        assert not store.check(["address"])
        store.set("address", attempt)
        assert mesh._of_attempt(launcher).get("address") == attempt.encode()
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    assert mesh._of_attempt(launcher) is launcher
