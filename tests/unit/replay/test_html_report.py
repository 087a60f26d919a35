"""The report as a page: one file without network, drawn in a browser where there is one."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kvledger.replay import replay
from kvledger.replay.html_report import LatencyCurves, html_report
from kvledger.replay.result import ReplayResult

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


def page(**options: Any) -> tuple[str, ReplayResult]:
    latencies = LatencyCurves()
    result = replay(hash="none", listeners=[latencies], **options)
    return html_report(result, latencies), result


def embedded(text: str) -> dict[str, Any]:
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    found: dict[str, Any] = json.loads(data)
    return found


def test_all_numbers_are_in_the_page_and_nothing_comes_from_elsewhere() -> None:
    text, result = page(limit=40, slo="ttft=1s")
    data = embedded(text)
    assert data["result"]["prefix_cache"]["num_hit_tokens"] == result.prefix_cache.num_hit_tokens
    assert len(data["latencies"]["ttft"]) == 101
    assert result.ttft_seconds is not None
    assert data["latencies"]["ttft"][100] == result.ttft_seconds.max
    assert data["latencies"]["ttft"][50] == result.ttft_seconds.p50
    # The name of the drawing language is no address.
    assert re.findall(r"(?:https?:)?//[\w.]+", text.replace("http://www.w3.org/2000/svg", "")) == []
    assert "default-src 'none'" in text


def test_no_name_ends_the_script() -> None:
    latencies = LatencyCurves()
    result = replay(limit=2, hash="none")
    result.trace = "</script><b>x</b>"
    text = html_report(result, latencies)
    assert embedded(text)["result"]["trace"] == result.trace
    assert "<b>x</b>" not in text


@pytest.mark.skipif(BROWSER is None, reason="no browser")
@pytest.mark.parametrize(
    "options",
    [
        {"limit": 120, "tp": 1, "slo": "ttft=2s,itl=50ms"},
        {"limit": 40, "sequential": True, "model": "openai/gpt-oss-120b", "tp": 2, "remember_evictions": 0},
    ],
    ids=["one-card", "in-sequence"],
)
def test_a_browser_draws_all_of_it(options: dict[str, Any], tmp_path: Path) -> None:
    text, result = page(**options)
    path = tmp_path / "report.html"
    path.write_text(text, encoding="utf-8")
    assert BROWSER is not None
    arguments = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/browser"]
    drawn = subprocess.run(
        [*arguments, "--dump-dom", path.as_uri()], capture_output=True, text=True, timeout=120, check=True
    ).stdout
    assert 'data-state="drawn"' in drawn
    # Up to the script, which has words of its own.
    shown = drawn[: drawn.index('<script type="application/json"')]
    sections = re.findall(r"<h2>(.*?)</h2>", shown)
    if result.mode == "scheduled":
        assert sections == ["Over simulated time", "Latency, simulated", "Why did it miss", "Why did it wait",
                            "Groups of layers", "Numbers"]  # fmt: skip
        # Two timelines, three curves of latencies, and the larger pools where something was evicted.
        assert shown.count("<svg") == 5 + bool(result.why_missed and result.why_missed.more_blocks)
    else:
        assert sections == ["Request by request", "Groups of layers", "Numbers"]
        assert "0: sliding window of 128" in shown
    assert f"{result.prefix_cache.num_hit_tokens:,}" in shown
    assert f"{result.num_prompt_tokens:,}" in shown
    assert "NaN" not in shown
    assert "undefined" not in shown
