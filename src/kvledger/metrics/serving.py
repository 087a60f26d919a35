"""serve_metrics(): a page for Prometheus. Text format, whatever the scraper asks for.

prometheus_client's own server offers OpenMetrics too, which Prometheus prefers, and there (0.26) writes a name like
kvledger:num_steps_total with an underscore for the colon: dashboards then find nothing.
"""

from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest

_TEXT: Final = "text/plain; version=0.0.4; charset=utf-8"


def serve_metrics(registry: CollectorRegistry, port: int, host: str = "127.0.0.1") -> ThreadingHTTPServer:
    """Serves /metrics from a thread of its own until shutdown() and server_close() of what is returned. Port 0: one
    that is free (`server_port`). OSError when the address cannot be had. Other hosts can read a public `host`."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_known = self.path.split("?")[0] in ("/", "/metrics")
            body = generate_latest(registry) if is_known else b"metrics are at /metrics\n"
            self.send_response(200 if is_known else 404)
            self.send_header("Content-Type", _TEXT)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """A scrape is no news."""

    server = ThreadingHTTPServer((host, port), Page)
    server.daemon_threads = True
    Thread(target=server.serve_forever, name="kvledger metrics", daemon=True).start()
    return server
