"""What an engine shows while it runs. Prometheus is in kvledger.metrics.prometheus, which needs the extra `metrics`."""

from kvledger.metrics.dashboard import dashboard_json
from kvledger.metrics.log_line import IntervalLog

__all__ = ["IntervalLog", "dashboard_json"]
