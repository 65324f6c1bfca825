"""One page of metrics for all processes: what replicas count gets their names, what servers count is added up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample


class ReplayCounter(Collector):
    """How many answers a server had computed again."""

    def __init__(self, prefix: str, model: str, count: Callable[[], int]) -> None:
        self._prefix, self._model, self._count = prefix, model, count

    def collect(self) -> Iterator[Metric]:
        text = "Answers computed again because their replica was lost."
        family = CounterMetricFamily(self._prefix + "replays", text, labels=("model_name",))
        family.add_metric([self._model], self._count())
        yield family


class Families(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = list(families)

    def collect(self) -> Iterator[Metric]:
        yield from self._families


def page_of(families: Iterable[Metric]) -> bytes:
    registry = CollectorRegistry()
    registry.register(Families(families))
    return generate_latest(registry)


def labelled(pages: Mapping[str, str]) -> list[Metric]:
    """The metrics of replicas, by name, as one: each sample says whose it is."""
    merged: dict[str, Metric] = {}
    for replica, page in pages.items():
        for family in text_string_to_metric_families(page):
            kept = merged.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            kept.samples += [one._replace(labels={**one.labels, "replica": replica}) for one in family.samples]
    return list(merged.values())


def summed(pages: Iterable[str]) -> list[Metric]:
    """Counters and histograms of several servers as those of one; it began when the first of them did."""
    merged: dict[str, Metric] = {}
    totals: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], Sample]] = {}
    for page in pages:
        for family in text_string_to_metric_families(page):
            merged.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            samples = totals.setdefault(family.name, {})
            for one in family.samples:
                key = (one.name, tuple(sorted(one.labels.items())))
                samples[key] = one if key not in samples else _joined(samples[key], one)
    for name, metric in merged.items():
        metric.samples = list(totals[name].values())
    return list(merged.values())


def _joined(a: Sample, b: Sample) -> Sample:
    return a._replace(value=min(a.value, b.value) if a.name.endswith("_created") else a.value + b.value)
