"""The Grafana dashboard that comes with the metrics: metrics/data/grafana.json, for Grafana 10 and later.

Its variables choose the data source, the prefix of the names, the model and the engine.
"""

from importlib.resources import files


def dashboard_json() -> str:
    """The dashboard as Grafana imports it."""
    return files("kvledger.metrics").joinpath("data", "grafana.json").read_text("utf-8")
