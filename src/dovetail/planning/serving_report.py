"""What a plan of serving says: the replicas of a model by their number of ranks, the best of them, and what some users need."""

from __future__ import annotations

import dataclasses as dc
from typing import Any

from dovetail.model.model import Model
from dovetail.planning.device import Device
from dovetail.planning.serving import Capacity, Load, RefusedRanks, Replica, assumptions
from dovetail.spec.fold import parameters


@dc.dataclass(frozen=True, repr=False)
class ServingReport:
    """Replicas of a model on a device, and the capacity that some users need of the best."""

    name: str
    spec: Model
    device: Device
    load: Load
    replicas: tuple[Replica, ...]
    refused: tuple[RefusedRanks, ...]
    capacity: Capacity | None

    @property
    def best(self) -> Replica | None:
        """The replica with the most requests per second and GPU."""
        return max(self.replicas, key=lambda one: one.requests(self.load) / one.tensor, default=None)

    def data(self) -> dict[str, Any]:
        """The plan as plain data."""

        def data(one: Replica) -> dict[str, Any]:
            return {
                **dc.asdict(one),
                "requests_per_second": one.requests(self.load),
                "tokens_per_second": one.tokens(self.load),
            }

        return {
            "spec": self.name,
            "parameters": parameters(self.spec),
            "device": self.device.name,
            **dc.asdict(self.load),
            "best": None if self.best is None else data(self.best),
            "replicas": [data(one) for one in self.replicas],
            "refused": [dc.asdict(one) for one in self.refused],
            "capacity": None if self.capacity is None else dc.asdict(self.capacity),
            "assumptions": list(assumptions(self.device, self.load)),
        }
