"""`kvledger replay --events`: what the replayed ledger tells others."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kvledger.cli import main
from kvledger.events import BlockRemoved, BlockStored, CacheView, EventSubscriber, read_events
from tests.unit.traces.recordings import mooncake, write


def trace(directory: Path) -> str:
    """Three prompts of two trace blocks of 16 tokens; the second repeats the first, the third shares its start."""
    records = [mooncake(0, 32, 1, [1, 2]), mooncake(1000, 32, 1, [1, 2]), mooncake(2000, 32, 1, [1, 3])]
    return write(directory, *records)


def replay(directory: Path, *arguments: str) -> int:
    return main(["replay", trace(directory), "--trace-block-size", "16", "--json", *arguments])


@pytest.mark.parametrize("mode", [(), ("--sequential",)])
@pytest.mark.parametrize("name", ["events.jsonl", "events.msgpack"])
def test_a_file_tells_what_became_cached_and_when(mode: tuple[str, ...], name: str, tmp_path: Path) -> None:
    path = str(tmp_path / name)
    assert replay(tmp_path, "--num-blocks", "10", "--events", path, *mode) == 0
    batches = [batch for _, batch in read_events(path)]
    stored = [event for batch in batches for event in batch.events]
    assert all(isinstance(event, BlockStored) for event in stored)
    # Content is made up: each trace block is one token, again and again.
    assert [event.token_ids for event in stored] == [[0] * 16 + [1] * 16, [2] * 16]
    assert stored[1].parent_block_hash == stored[0].block_hashes[0]
    assert [batch.ts for batch in batches] == sorted(batch.ts for batch in batches)


def test_evictions_are_told_of(tmp_path: Path) -> None:
    path = str(tmp_path / "events.jsonl")
    assert replay(tmp_path, "--num-blocks", "4", "--events", path, "--sequential") == 0
    view = CacheView()
    removed = []
    for _, batch in read_events(path):
        view.apply(batch.events)
        removed += [event for event in batch.events if isinstance(event, BlockRemoved)]
    # 3 blocks for 3 different ones: the third prompt takes the free one.
    assert (len(view.blocks), removed) == (3, [])
    assert replay(tmp_path, "--num-blocks", "3", "--events", path, "--sequential", "--overwrite") == 0
    batches = [batch for _, batch in read_events(path)]
    kinds = [type(event) for event in batches[-1].events]
    assert kinds == [BlockRemoved, BlockStored]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--events", "events.txt"),
            "--events 'events.txt': neither a socket nor a known kind of file; end it in .jsonl",
        ),
        (
            ("--events", "/nowhere/e.jsonl"),
            "--events '/nowhere/e.jsonl': there is no directory /nowhere; make it",
        ),
        (("--events", "e.jsonl", "--hash", "none"), "--hash 'none': events carry the tokens of blocks, and these have"),
        (
            ("--events", "udp://*:1"),
            "--events 'udp://*:1': endpoint='udp://*:1': no address of a socket; give one like",
        ),
        (
            ("--events", "tcp://*:65535"),
            "--events 'tcp://*:65535': events take three ports, this one and the two behind it, and the last port is "
            "65535; name a port up to 65533",
        ),
    ],
)
def test_what_cannot_work_is_said(
    arguments: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert replay(tmp_path, *arguments) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_subscriber_hears_everything_from_the_start(tmp_path: Path) -> None:
    pytest.importorskip("zmq")
    address = f"ipc://{tmp_path}/events"
    command = [sys.executable, "-m", "kvledger", "replay", trace(tmp_path), "--trace-block-size", "16"]
    command += ["--num-blocks", "10", "--events", address, "--json"]
    with (
        EventSubscriber(address) as subscriber,
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process,
    ):
        view = CacheView()
        while len(view.blocks) < 3:
            batches = subscriber.receive(30)
            assert batches, "nothing comes"
            for batch in batches:
                view.apply(batch.events)
        assert process.stderr is not None
        assert process.stderr.read() == (
            f"kvledger: waiting for a subscriber at {address} (replay {address}-1, snapshots {address}-2)\n"
        )
        assert process.wait() == 0
        assert subscriber.num_catch_ups == 0


@pytest.mark.parametrize(
    "wrong", [("--sequential", "--log-interval", "1"), ("--closed-loop",), ("--no-prefix-caching",)]
)
def test_a_wrong_command_line_leaves_an_earlier_recording_alone(wrong: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text("an earlier recording")
    assert replay(tmp_path, "--num-blocks", "10", "--events", str(path), *wrong) == 2
    assert path.read_text() == "an earlier recording"


def test_what_is_not_cached_is_not_told_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert replay(tmp_path, "--events", "tcp://*:0") == 2
    assert "--events 'tcp://*:0': a port that the system chooses" in capsys.readouterr().err
    assert replay(tmp_path, "--events", str(tmp_path / "events.jsonl"), "--no-prefix-caching") == 2
    assert "nothing is cached, so there are none; leave it out" in capsys.readouterr().err


def test_a_socket_is_bound_on_the_address_that_is_named(tmp_path: Path) -> None:
    """Nobody else listens there, so a replay that connected would wait for ever."""
    pytest.importorskip("zmq")
    port = free_ports()
    address = f"tcp://127.0.0.1:{port}"
    command = [sys.executable, "-m", "kvledger", "replay", trace(tmp_path), "--trace-block-size", "16"]
    command += ["--num-blocks", "10", "--events", address, "--json"]
    with (
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process,
        EventSubscriber(address) as subscriber,
    ):
        assert subscriber.receive(30)
        assert process.wait(30) == 0


def test_a_port_that_is_taken_ends_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("zmq")
    with socket.socket() as owner:
        owner.bind(("127.0.0.1", 0))
        owner.listen()
        address = f"tcp://127.0.0.1:{owner.getsockname()[1]}"
        assert replay(tmp_path, "--events", address) == 2
    err = " ".join(capsys.readouterr().err.split())
    assert f"endpoint='{address}': cannot be opened (Address already in use" in err


def free_ports() -> int:
    """The first of three ports that nobody has."""
    while True:
        with socket.socket() as first, socket.socket() as second, socket.socket() as third:
            first.bind(("127.0.0.1", 0))
            port: int = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 1))
                third.bind(("127.0.0.1", port + 2))
            except (OSError, OverflowError):
                continue
            return port


def test_a_file_that_is_there_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text("mine")
    assert replay(tmp_path, "--events", str(path)) == 2
    assert "is there already; name another file, or give --overwrite" in capsys.readouterr().err
    assert path.read_text() == "mine"
    assert replay(tmp_path, "--events", str(path), "--overwrite") == 0
    assert len(list(read_events(str(path)))) == 2


def test_a_file_in_no_directory_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert replay(tmp_path, "--events", str(tmp_path / "nowhere" / "events.jsonl")) == 2
    assert "there is no directory" in " ".join(capsys.readouterr().err.split())
