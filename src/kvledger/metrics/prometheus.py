"""Metrics of a scheduler, its ledger and its requests. Needs the extra `metrics` (prometheus-client)."""

from kvledger.metrics.request_metrics import RequestMetrics
from kvledger.metrics.scheduler_metrics import SchedulerMetrics
from kvledger.metrics.serving import serve_metrics
from kvledger.metrics.target import MetricsTarget

__all__ = ["MetricsTarget", "RequestMetrics", "SchedulerMetrics", "serve_metrics"]
