"""Asks a real Prometheus every query of the Grafana dashboard, over a page of metrics that is there now.

    python scripts/check_dashboard.py 127.0.0.1:9478 --seconds 30      (needs `prometheus`; Debian has it)

Says of each query what it gives, and fails where one is no PromQL. A query without data is no error: a server without
drafts has no acceptance rate.
"""

import argparse
import json
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlencode
from urllib.request import urlopen

from kvledger.metrics import dashboard_json

VARIABLES = {"model_name": ".*", "engine": ".*", "__rate_interval": "15s", "__interval": "15s", "__range": "1m"}


def queries(prefix: str) -> Iterator[tuple[str, str]]:
    """(title of the panel, its query with all variables in)."""
    for panel in json.loads(dashboard_json())["panels"]:
        for target in panel.get("targets", []):
            query = target["expr"]
            for name, value in {**VARIABLES, "prefix": prefix}.items():
                query = query.replace(f"${{{name}}}", value).replace(f"${name}", value)
            yield panel["title"], query


def ask(address: str, query: str) -> list[Any]:
    with urlopen(f"{address}/api/v1/query?{urlencode({'query': query})}") as answer:
        result: list[Any] = json.load(answer)["data"]["result"]
        return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("address", help="HOST:PORT whose /metrics is scraped")
    parser.add_argument("--prefix", default="kvledger:")
    parser.add_argument("--seconds", type=float, default=30.0, help="how long Prometheus collects")
    options = parser.parse_args()
    prometheus = shutil.which("prometheus")
    if prometheus is None:
        raise SystemExit("check_dashboard: no prometheus; apt-get install prometheus")
    with socket.socket() as free, TemporaryDirectory() as directory:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        config = Path(directory) / "prometheus.yml"
        config.write_text(
            "global: {scrape_interval: 1s}\n"
            f"scrape_configs: [{{job_name: dashboard, static_configs: [{{targets: ['{options.address}']}}]}}]\n"
        )
        command = [prometheus, f"--config.file={config}", f"--storage.tsdb.path={directory}/data"]
        command.append(f"--web.listen-address=127.0.0.1:{port}")
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
            try:
                time.sleep(options.seconds)
                return report(f"http://127.0.0.1:{port}", options.prefix)
            finally:
                server.terminate()


def report(address: str, prefix: str) -> int:
    num_wrong = num_empty = 0
    for title, query in queries(prefix):
        try:
            found = ask(address, query)
        except HTTPError as error:
            num_wrong += 1
            print(f"WRONG    {title}: {query}\n         {error.read().decode()[:200]}")
            continue
        num_empty += not found
        values = ", ".join(
            f"{'/'.join(re.sub('^.*:', '', str(label)) for label in each['metric'].values()) or 'value'} "
            f"{float(each['value'][1]):.4g}"
            for each in found[:6]
        )
        print(f"{'no data' if not found else 'data   '}  {title}: {values}")
    print(f"{num_wrong} wrong, {num_empty} without data")
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
