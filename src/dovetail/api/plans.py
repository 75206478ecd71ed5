"""What the planning of a job returns: the layouts in which a model can be trained on many GPUs (`plan`), or the replicas that
serve it (`plan_serving`)."""

from __future__ import annotations

import dataclasses as dc
from typing import Any

from dovetail.api.result import Result
from dovetail.planning.report import PlanReport, layout_data
from dovetail.planning.serving import ServingReport
from dovetail.spec.fold import parameters
from dovetail.views.blocks import View
from dovetail.views.page import Page
from dovetail.views.plan import plan_page, plan_view, serving_view


@dc.dataclass(frozen=True, repr=False)
class TrainingPlan(PlanReport, Result):
    """Layouts of a job, fastest first, and those that cannot run."""

    @property
    def failed(self) -> bool:
        return self.best is None

    def to_dict(self) -> dict[str, Any]:
        found = [layout_data(self.job, one, out) for one, out in zip(self.layouts, self.outlooks, strict=True)]
        sure = None if not self.outlooks else dc.asdict(self.outlooks[0].reliability)
        return {
            "spec": self.name,
            "parameters": parameters(self.job.spec),
            "gpus": self.job.gpus,
            "device": self.job.device.name,
            "length": self.job.length,
            "batch": self.job.batch,
            "tokens": self.tokens,
            "best": found[0] if self.best is not None else None,
            "reason": self.reason,
            "reliability": sure,
            "layouts": found,
            "refused": [{"layout": dc.asdict(one.layout), "reason": one.reason} for one in self.refused],
            "not_traced": self.not_traced,
            "assumptions": self.assumptions,
        }

    def view(self, width: int) -> View:
        return list(plan_view(self, width))

    def page(self) -> Page:
        return Page(f"dovetail plan {self.name}", plan_page(self))


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
