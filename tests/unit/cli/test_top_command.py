"""`kvledger top` over servers that show what vLLM's and the ledger's do."""

import json
import socket
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest

from kvledger.cli import main
from kvledger.events import LedgerEvents, ZmqOptions, ZmqSink
from tests.helpers import admitted, kv_config, leave, ledger, other

Serve = Callable[[list[str]], str]

VLLM = """
vllm:num_requests_running{engine="0",model_name="smol"} 3
vllm:num_requests_waiting{engine="0",model_name="smol"} 2
vllm:kv_cache_usage_perc{engine="0",model_name="smol"} 0.25
vllm:cache_config_info{block_size="16",engine="0",model_name="smol",num_gpu_blocks="101"} 1
"""
COUNTERS = """
vllm:prefix_cache_queries_total{{engine="0",model_name="smol"}} {queries}
vllm:prefix_cache_hits_total{{engine="0",model_name="smol"}} {hits}
vllm:num_preemptions_total{{engine="0",model_name="smol"}} {preemptions}
vllm:prompt_tokens_total{{engine="0",model_name="smol"}} {queries}
vllm:generation_tokens_total{{engine="0",model_name="smol"}} 5
vllm:time_to_first_token_seconds_sum{{engine="0",model_name="smol"}} {hits}
vllm:time_to_first_token_seconds_count{{engine="0",model_name="smol"}} {queries}
"""
WHY = """
kvledger:num_requests_without_tokens{{engine="0",model_name="smol",reason="blocks"}} 1
kvledger:num_requests_without_tokens{{engine="0",model_name="smol",reason="behind"}} 1
kvledger:num_requests_without_tokens{{engine="0",model_name="smol",reason="token_budget"}} 0
kvledger:kv_cache_blocks{{engine="0",model_name="smol",state="live"}} 25
kvledger:kv_cache_blocks{{engine="0",model_name="smol",state="cached"}} 50
kvledger:kv_cache_blocks{{engine="0",model_name="smol",state="unused"}} 25
kvledger:prefix_cache_tokens_total{{engine="0",model_name="smol",reason="hit"}} {hit}
kvledger:prefix_cache_tokens_total{{engine="0",model_name="smol",reason="evicted"}} {evicted}
kvledger:kv_cache_evictions_total{{cause="reused",engine="0",model_name="smol"}} {evicted}
"""


def vllm(queries: int, hits: int, preemptions: int = 0) -> str:
    return VLLM + COUNTERS.format(queries=queries, hits=hits, preemptions=preemptions)


@pytest.fixture
def serve() -> Iterator[Serve]:
    """serve(pages): the address of a server that shows one page after the other, and the last one from then on."""
    servers: list[HTTPServer] = []

    def start(pages: list[str]) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200 if self.path == "/metrics" else 404)
                self.end_headers()
                self.wfile.write((pages.pop(0) if len(pages) > 1 else pages[0]).encode())

            def log_message(self, format: str, *args: object) -> None:
                """Nothing."""

        server = HTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        return f"127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["top", *arguments, "--interval", "0.05"])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_any_vllm_is_shown_between_two_looks(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    server = serve([vllm(1000, 100), vllm(1200, 250, preemptions=2)])
    code, out, err = run(capsys, server, "--why", serve([WHY.format(hit=0, evicted=0)]), "--once", "--json")
    assert (code, err) == (0, "")
    seen = json.loads(out)
    assert (seen["model"], seen["num_running"], seen["num_waiting"], seen["num_blocks"]) == ("smol", 3, 2, 101)
    assert seen["hit_rate"] == 150 / 200
    assert seen["preemptions"] == 2
    assert seen["ttft_seconds"] == 150 / 200
    assert seen["prompt_tokens_per_second"] == pytest.approx(200 / seen["seconds"])


def test_the_ledger_inside_says_why(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    why = serve([WHY.format(hit=100, evicted=10), WHY.format(hit=160, evicted=50)])
    code, out, _ = run(capsys, serve([vllm(1000, 100)]), "--why", why, "--once")
    assert code == 0
    assert "25 live, 50 cached, 25 unused" in out
    assert "Prompt tokens: hit 60.0%, evicted 40.0%" in out
    assert "Evictions: 40 reused" in out
    assert "Waiting: 1 blocks, 1 behind" in out


def test_without_it_the_pool_is_what_vllm_says(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, f"http://{serve([vllm(1000, 100)])}/metrics", "--why", serve(["x 1"]), "--once")
    assert code == 0
    assert "25.0% of 101 blocks of 16 tokens held" in " ".join(out.split())
    assert "not known; KVLEDGER_VLLM=1 KVLEDGER_WHY=1 says" in out


def test_a_server_that_started_anew_is_seen_from_its_start(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, serve([vllm(1000, 100), vllm(50, 20)]), "--why", serve(["x 1"]), "--once", "--json")
    assert code == 0
    assert (json.loads(out)["seconds"], json.loads(out)["hit_rate"]) == (None, 20 / 50)


@pytest.mark.parametrize("page", ["<html></html>", "other_metric 1\n", "vllm:x{ 1"])
def test_what_is_no_such_server_is_said(serve: Serve, capsys: pytest.CaptureFixture[str], page: str) -> None:
    code, out, err = run(capsys, serve([page]), "--once")
    assert (code, out) == (1, "")
    assert "no page of Prometheus metrics" in err or "neither vLLM's nor a ledger's" in err


def test_nobody_answers(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    code, _, err = run(capsys, f"127.0.0.1:{port}", "--once")
    assert (code, f"http://127.0.0.1:{port}/metrics: no answer (Connection refused)" in err) == (1, True)


@pytest.mark.parametrize("address", ["", "ftp://host", "host:port", "127.0.0.1:99999"])
def test_an_address_that_is_none(capsys: pytest.CaptureFixture[str], address: str) -> None:
    code, _, err = run(capsys, address, "--once")
    assert code == 2
    assert "no address of a server" in err


def test_events_show_the_largest_prefixes(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as first, socket.socket() as second:
        first.bind(("127.0.0.1", 0))
        second.bind(("127.0.0.1", 0))
        ports = first.getsockname()[1], second.getsockname()[1]
    endpoint, replay = (f"tcp://127.0.0.1:{port}" for port in ports)
    events = LedgerEvents(kv_config(20), ZmqSink(ZmqOptions(endpoint, replay)))
    manager = ledger(20, observer=events.observer)
    for name, family, num_tokens in (("a", 1, 12), ("b", 2, 4)):
        leave(manager, admitted(manager, name, other(num_tokens, family)))
        events.end_step(time.time())
    page = serve([vllm(10, 1)])
    try:
        code, out, err = run(
            capsys, page, "--why", page, "--events", endpoint, "--events-replay", replay, "--once", "--json"
        )
    finally:
        events.close()
    assert (code, err) == (0, "")
    seen = json.loads(out)
    assert seen["cached_blocks"] == 4
    assert [(tree["num_blocks"], tree["num_shared_tokens"]) for tree in seen["prefixes"]] == [(3, 12), (1, 4)]
