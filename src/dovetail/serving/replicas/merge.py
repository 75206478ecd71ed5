"""The metrics of all replicas in one page: each sample has the label `replica`, so that Prometheus can sum or compare them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

LABEL = "replica"


class Merged(Collector):
    """The families of several pages."""

    def __init__(self, pages: Mapping[str, str]) -> None:
        self.pages = pages

    def collect(self) -> Iterator[Metric]:
        """Yield each family once, with the samples of all replicas."""
        families: dict[str, Metric] = {}
        for replica, page in self.pages.items():
            for family in text_string_to_metric_families(page):
                merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                for sample in family.samples:
                    merged.add_sample(sample.name, {**sample.labels, LABEL: replica}, sample.value)
        yield from families.values()


def merge(pages: Mapping[str, str]) -> bytes:
    """Return one page of metrics from the pages of replicas, which are given by name."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Merged(pages))
    return generate_latest(registry)
