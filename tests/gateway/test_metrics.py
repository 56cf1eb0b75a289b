"""Series by model."""

from __future__ import annotations

from gateway import metrics


def counted(model: str) -> set[str]:
    return {
        sample.name
        for metric in (metrics.REQUESTS, metrics.TTFT, metrics.SLO)
        for family in metric.collect()
        for sample in family.samples
        if sample.labels.get("model") == model
    }


def test_series_of_a_model_go_with_it_and_those_of_others_stay() -> None:
    series = metrics.Series()
    series({"going": None, "staying": None})
    for model in ("going", "staying"):
        metrics.REQUESTS.labels(model, "ok").inc()
        metrics.TTFT.labels(model).observe(0.1)
        metrics.SLO.labels(model, "ttft", "true").inc()
    series({"staying": None})
    assert not counted("going") and len(counted("staying")) > 3


def test_what_a_request_counted_after_its_model_went_goes_with_the_next_one() -> None:
    series = metrics.Series()
    series({"first": None, "second": None})
    series({"second": None})
    metrics.REQUESTS.labels("first", "ok").inc()
    series({})
    assert not counted("first")


def test_a_model_that_is_back_is_counted_from_then_on() -> None:
    series = metrics.Series()
    series({"a": None, "b": None})
    series({"b": None})
    series({"a": None, "b": None})
    metrics.REQUESTS.labels("a", "ok").inc()
    series({"a": None})
    assert counted("a")
