"""ServingPlan: what `plan_serving` returns, the replicas of a model on a device."""

from __future__ import annotations

import dataclasses as dc
from typing import Any

from dovetail.api.result import Result
from dovetail.planning.serving import ServingReport
from dovetail.views.blocks import View
from dovetail.views.plan import serving_view


@dc.dataclass(frozen=True, repr=False)
class ServingPlan(ServingReport, Result):
    """Replicas of a model on a device, by their number of ranks, and what some users need of the best."""

    @property
    def failed(self) -> bool:
        return self.best is None

    def to_dict(self) -> dict[str, Any]:
        return self.data()

    def view(self, width: int) -> View:
        return serving_view(self)
