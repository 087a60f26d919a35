"""Counts and bytes on command lines: what they mean is the same in every command."""

import json

import pytest

from kvledger.cli import main
from kvledger.errors import ConfigError
from kvledger.plan.counts import parse_bytes, parse_count, parse_length, parse_number


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("32768", 32_768),
        ("32k", 32_000),
        ("32K", 32_768),
        ("25.6k", 25_600),
        ("1.5K", 1536),
        ("1,000", 1000),
        ("1_000", 1000),
        ("1e6", 1_000_000),
        (" 2 m ", 2_000_000),
    ],
)
def test_a_count_is_whole_with_a_letter_or_without(text: str, value: int) -> None:
    assert parse_count("--x", text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1000", 1000),
        ("40G", 40 << 30),
        ("40GiB", 40 << 30),
        ("40gib", 40 << 30),
        ("40g", 40_000_000_000),
        ("40GB", 40_000_000_000),
        ("1.5 MB", 1_500_000),
        ("2kib", 2048),
        ("0b", 0),
        # 54.6 * 2**30 = 58,626,303,590.4: of a part of a byte nothing is left.
        ("54.6GiB", 58_626_303_590),
        # Exact where a float is not: 2**53 + 1.
        ("9007199254740993", 9_007_199_254_740_993),
    ],
)
def test_bytes_are_gib_by_powers_of_two_and_gb_by_thousands(text: str, value: int) -> None:
    assert parse_bytes("--x", text) == value


def test_length_may_be_automatic() -> None:
    assert parse_length("--max-model-len", "auto") == parse_length("--max-model-len", "-1") == -1
    assert parse_length("--max-model-len", "8k") == 8000


@pytest.mark.parametrize("text", ["many", "-3", "3q", "", "32KB", "0.5", "1" * 100, "1e30", "k", "1e999999", "٣"])
def test_what_is_no_count_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match="32K"):
        parse_count("--max-model-len", text)


@pytest.mark.parametrize("text", ["much", "-1GiB", "1XB", "", "1000000000000000000GiB", "1e18GiB", "9" * 5000])
def test_what_is_no_number_of_bytes_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match="40GiB"):
        parse_bytes("--memory", text)


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "1e999", "abc"])
def test_a_number_is_finite(text: str) -> None:
    with pytest.raises(ConfigError, match="number"):
        parse_number("--speed-up", text)


@pytest.mark.parametrize("size", ["40GB", "40G", "40GiB", "40g", "54.6GiB", "40000000000"])
def test_plan_and_replay_make_the_same_pool_of_the_same_words(size: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Llama 3.1 8B keeps 128 KiB a token, 2 MiB a block of 16."""
    blocks = parse_bytes("", size) // (2 << 20)
    engine = ["meta-llama/Llama-3.1-8B", "--gpu", "H100", "--max-model-len", "2k"]
    assert main(["plan", *engine, "--kv-cache-memory-bytes", size, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_blocks"] == blocks
    replayed = ["--model", *engine, "--kv-cache-memory-bytes", size, "--limit", "1", "--hash", "none", "--json"]
    main(["replay", *replayed])
    assert json.loads(capsys.readouterr().out)["num_blocks"] == blocks


@pytest.mark.parametrize(
    "command",
    [
        ["plan", "meta-llama/Llama-3.1-8B", "--gpu", "H100", "--max-num-seqs"],
        ["plan", "meta-llama/Llama-3.1-8B", "--gpu", "H100", "--max-num-batched-tokens"],
        ["plan", "meta-llama/Llama-3.1-8B", "--gpu", "H100", "--max-model-len"],
        ["plan", "meta-llama/Llama-3.1-8B", "--gpu", "H100", "--block-size"],
        ["replay", "--max-num-seqs"],
        ["replay", "--max-model-len"],
        ["replay", "--max-num-batched-tokens"],
        ["generate", "--model", "x", "--prompt", "y", "--max-num-seqs"],
    ],
    ids=" ".join,
)
def test_a_wrong_count_is_refused_in_the_same_words_everywhere(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "12q"]) == 2
    err = " ".join(capsys.readouterr().err.split())
    assert f"Invalid value for '{command[-1]}': '12q': not a whole number; give one like 32768, 32k" in err
