"""python -m benchmarks.peers as a user meets it."""

import json
from pathlib import Path

import pytest

from benchmarks.peers.command import main
from benchmarks.peers.peers import find_interpreters
from kvledger.errors import ConfigError


@pytest.fixture(autouse=True)
def no_peers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Peers of the machine that the tests run on are none of their business."""
    monkeypatch.setenv("KVLEDGER_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("KVLEDGER_REFERENCE", raising=False)
    for name in ("VLLM", "SGLANG", "DYNAMO"):
        monkeypatch.delenv(f"KVLEDGER_PEER_{name}", raising=False)


def test_the_questions_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert names[:3] == ["scheduler_step", "decode_step", "admission"]


def test_without_peers_ours_is_measured_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--quick", "--question", "free", "--json"]) == 0
    printed = capsys.readouterr()
    rows = json.loads(printed.out)
    assert [(row["question"], row["size"], row["peer"]) for row in rows] == [
        ("free", "512 tokens", None),
        ("free", "32k tokens", None),
    ]
    assert all(row["ours"] > 0 for row in rows)
    assert "scripts/make_peers.sh" in printed.err


def test_the_release_that_ours_decides_as_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    for asked, named in (([], "0.33"), (["--vllm-version", "0.32.1"], "0.32")):
        assert main(["--quick", "--question", "free", *asked]) == 0
        assert f"deciding as vLLM {named}\n" in capsys.readouterr().out


def test_a_peer_that_fails_to_start_is_named_and_the_rest_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["--quick", "--question", "pool_build", "--peer-python", "vllm=/nowhere/python"])
    printed = capsys.readouterr()
    assert code == 1
    assert "| pool_build | 10k blocks |" in printed.out
    assert "vllm: " in printed.err


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--question", "speed"], "--question 'speed': no such question; use one of scheduler_step"),
        (["--json", "--markdown"], "give one"),
        (["--peer", "orca"], "--peer 'orca': unknown peer"),
        (["--peer-python", "vllm"], "--peer-python 'vllm': not a name and a path"),
        (["--vllm-version", "0.5"], "--vllm-version='0.5': not a release that is modelled; use 0.33 or 0.32"),
        (["--peer", "vllm"], "no interpreter at"),
    ],
)
def test_mistakes_on_the_command_line(arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    printed = " ".join(capsys.readouterr().err.split())
    assert problem in printed


def test_where_a_peer_is_looked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    usual = tmp_path / "cache" / "peers" / "dynamo" / "bin" / "python"
    usual.parent.mkdir(parents=True)
    usual.touch()
    assert find_interpreters({}, ()) == {"dynamo": str(usual)}
    monkeypatch.setenv("KVLEDGER_PEER_DYNAMO", "/other/python")
    assert find_interpreters({}, ()) == {"dynamo": "/other/python"}
    assert find_interpreters({"dynamo": "/given/python"}, ("dynamo",)) == {"dynamo": "/given/python"}
    with pytest.raises(ConfigError, match=r"peer='sglang': no interpreter .* --peer-python sglang=PATH"):
        find_interpreters({}, ("dynamo", "sglang"))
