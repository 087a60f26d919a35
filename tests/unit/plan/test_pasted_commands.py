"""Pasted command lines: what vLLM's parser makes of them, and what the plan makes of each option."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvledger.errors import ConfigError
from kvledger.plan.command_line import parse_pasted
from kvledger.plan.serve_parser import REPLACED, option_effects, parse_serve, serve_options
from kvledger.plan.versions import VERSIONS


def arguments(line: str, release: str = "0.33") -> list[str]:
    """Behind the model and the entry point."""
    pasted = parse_pasted([line], release)
    assert pasted.arguments[1] == "--entry-point=server"
    return [*pasted.arguments[2:]]


def values(line: str, release: str = "0.33") -> dict[str, Any]:
    return dict(parse_serve(line.split(), release).values)


# What the words mean


def test_serve_line_keeps_what_concerns_memory() -> None:
    line = "CUDA_VISIBLE_DEVICES=0,1 vllm serve Qwen/Qwen3-8B -tp 2 --max-model-len 32k --port 8000 --enforce-eager"
    pasted = parse_pasted(line.split())
    assert pasted.arguments == (
        "Qwen/Qwen3-8B", "--entry-point=server", "--tensor-parallel-size=2", "--max-model-len=32000", "--enforce-eager",
    )  # fmt: skip
    assert pasted.remarks == ("--port: no change to the plan (the server and its API)",)
    assert pasted.unmodelled == ()


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("-q fp8", "--quantization=fp8"),
        ("--tensor_parallel 2", "--tensor-parallel-size=2"),
        ("--kv-cache-memory=40000000000", "--kv-cache-memory-bytes=40000000000"),
        ("--kv-cache-memory-bytes 40G", "--kv-cache-memory-bytes=42949672960"),
        ("--device-memory-utilization 0.8", "--gpu-memory-utilization=0.8"),
        ("--gpu-mem 0.8", "--gpu-memory-utilization=0.8"),
        ("--kv_cache_dtype fp8", "--kv-cache-dtype=fp8"),
        ("--kv-cache-dtype-skip-layers 0 sliding_window", "--kv-cache-dtype-skip-layers=0,sliding_window"),
        ("--performance-mode throughput", "--performance-mode=throughput"),
        ("--no-enable-chunked-prefill", "--no-enable-chunked-prefill"),
        ("--disable-prefix-caching", "--no-enable-prefix-caching"),
        ("--enable-hybrid-kv-cache-manager", "--no-disable-hybrid-kv-cache-manager"),
        ("--max-model-len auto", "--max-model-len=-1"),
        ("--max-model-len -1", "--max-model-len=-1"),
        ("-O0", "--optimization-level=0"),
        ("-O=1", "--optimization-level=1"),
        ("-O 3", "--optimization-level=3"),
        ("-cc.cudagraph_mode=NONE", '--compilation-config={"cudagraph_mode": "NONE"}'),
        ("--hf-overrides.rope_scaling.factor 4.0", '--hf-overrides={"rope_scaling": {"factor": 4.0}}'),
        ("-pcp 2", "--prefill-context-parallel-size=2"),
        ("-ep", "--enable-expert-parallel"),
        ("-tp 2 -tp 4", "--tensor-parallel-size=4"),
    ],
)
def test_names_and_values_mean_what_they_mean_to_vllm(written: str, meant: str) -> None:
    assert arguments(f"vllm serve m {written}") == [meant]


def test_an_option_of_a_later_release_is_none_of_an_earlier_one() -> None:
    assert values("--disable-prefix-caching") == {"enable_prefix_caching": False}
    with pytest.raises(ConfigError, match=r"--disable-prefix-caching: vllm serve of release 0\.32 has no such option"):
        values("--disable-prefix-caching", "0.32")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("ls -l", "not a vllm command"),
        ("vllm chat x", "'vllm chat': not a command that starts an engine"),
        ("vllm serve --port 1", "names no model"),
        ("vllm serve m --block-size", "expected one argument"),
        ("vllm serve m --block-size x", "invalid int value: 'x'"),
        ("vllm serve m --max-num-seqs 2k", "invalid int value: '2k'"),
        ("vllm serve m --dtype int3", "invalid choice: 'int3'"),
        ("vllm serve m --compilation-config {", "invalid loads value"),
        ("vllm serve m --max-num 2", "ambiguous option: --max-num could match"),
        ("vllm serve m --tensor-parralel-size 2", "did you mean --tensor-parallel-size"),
        ("vllm serve m --gpu H100", "--gpu-memory-utilization: invalid float value: 'H100'"),
        ("vllm serve m n", "command='n': vLLM would refuse these words"),
    ],
)
def test_what_vllm_would_refuse_is_refused(line: str, words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_pasted([line])
    assert words in str(raised.value)


def test_options_from_a_file_go_behind_the_command_line(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    path = tmp_path / "options.yaml"
    path.write_text(
        "model: m\ntensor-parallel-size: 4\nenforce-eager: true\nenable-chunked-prefill: false\n"
        "compilation-config:\n  cudagraph_mode: NONE\n"
    )
    assert arguments(f"vllm serve --config {path} -tp 2") == [
        "--tensor-parallel-size=2",
        "--enforce-eager",
        "--no-enable-chunked-prefill",
        '--compilation-config={"cudagraph_mode": "NONE"}',
    ]


# The dress that a command comes in


@pytest.mark.parametrize(
    "line",
    [
        "vllm serve m -tp 2",
        "vllm serve -tp 2 m",
        "vllm serve --enforce-eager -tp 2 m",
        "vllm serve -tp 2 --model m",
        "$ vllm serve \\\n  m \\\n  -tp 2",
        "uv run vllm serve m -tp 2",
        "uv run --with vllm vllm serve m -tp 2",
        "sudo nohup env A=1 /opt/venv/bin/vllm serve m -tp 2 > vllm.log 2>&1 &",
        "vllm serve m -tp 2 | tee log",
        "export VLLM_USE_V1=1; vllm serve m -tp 2; echo done",
        "bash -c 'vllm serve m -tp 2'",
        "python -m vllm.entrypoints.openai.api_server --model m -tp 2",
        "python3 -m vllm.entrypoints.cli.main serve m -tp 2",
        "docker run --gpus all vllm/vllm-openai:latest --model m -tp 2",
        "docker run --rm -it --runtime nvidia -v ~/.cache:/root -p 8000:8000 --ipc=host my/llm:1 --model m -tp 2",
        "podman run -d --name x nvcr.io/nvidia/vllm:25.09 vllm serve m -tp 2",
        "docker run --gpus all -e HF_TOKEN=x rocm/vllm:latest bash -c 'vllm serve m -tp 2'",
        "docker run ghcr.io/a/b serve m -tp 2",
        "srun -N 1 vllm serve m -tp 2",
    ],
)
def test_one_command_in_many_dresses(line: str) -> None:
    pasted = parse_pasted([line])
    assert pasted.arguments[0] == "m"
    assert "--tensor-parallel-size=2" in pasted.arguments
    assert pasted.unmodelled == ()


def test_offline_commands_have_the_defaults_of_the_llm_class() -> None:
    pasted = parse_pasted(["vllm bench throughput --model m --num-prompts 10"])
    assert pasted.arguments == ("m", "--entry-point=llm")
    assert pasted.remarks == ("--num-prompts is no option of an engine",)


def test_settings_of_the_environment_wherever_they_stand() -> None:
    assert arguments("VLLM_PP_LAYER_PARTITION=16,32 vllm serve m -pp 2") == [
        "--pp-layer-partition=16,32",
        "--pipeline-parallel-size=2",
    ]
    line = "docker run -e VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 vllm/vllm-openai m --max-model-len 1M"
    assert arguments(line) == ["--allow-long-max-model-len", "--max-model-len=1048576"]
    assert arguments("VLLM_ALLOW_LONG_MAX_MODEL_LEN=0 vllm serve m") == []
    assert "VLLM_MLA_DISABLE" in parse_pasted(["VLLM_MLA_DISABLE=1 vllm serve m"]).unmodelled[0]


# What the plan makes of an option


@pytest.mark.parametrize("release", VERSIONS)
def test_every_option_of_vllm_has_one_effect(release: str) -> None:
    options = serve_options(release)
    assert len(options) > 300
    assert {option.dest for option in options} <= option_effects().keys()
    for dest, effect in option_effects().items():
        assert effect.kind in ("modelled", "none", "matters"), dest
        assert bool(effect.words) == (effect.kind != "modelled"), dest


def test_no_effect_stands_for_an_option_that_no_release_has() -> None:
    known = {option.dest for release in VERSIONS for option in serve_options(release)}
    assert option_effects().keys() <= known


def test_every_modelled_option_is_one_of_the_plans_own() -> None:
    from kvledger.cli.engine_options import PLANNED_ENGINE_FIELDS

    modelled = {dest for dest, effect in option_effects().items() if effect.kind == "modelled"}
    assert modelled - {"model"} <= set(PLANNED_ENGINE_FIELDS)


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ("--load-format dummy", "--load-format is not modelled: weights"),
        ('--kv-transfer-config {"kv_connector":"X"}', "hybrid manager"),
    ],
)
def test_what_matters_and_is_not_modelled_is_said(written: str, words: str) -> None:
    (warning,) = parse_pasted(["vllm", "serve", "m", *written.split()]).unmodelled
    assert words in warning


@pytest.mark.parametrize(
    "written", ["--mm-ipc-gpu-memory-gb 0", "--no-enable-eplb", "--load-format auto", "--max-cpu-loras 4", "--seed 1"]
)
def test_what_is_off_or_without_effect_is_no_warning(written: str) -> None:
    pasted = parse_pasted([f"vllm serve m {written}"])
    assert (pasted.unmodelled, pasted.arguments[2:]) == ((), ())


def test_options_without_effect_are_one_note_a_reason() -> None:
    pasted = parse_pasted(["vllm serve m --port 1 --host h --seed 3 --api-key x"])
    assert pasted.remarks == (
        "--port, --host, --api-key: no change to the plan (the server and its API)",
        "--seed: no change to the plan (sampling and outputs)",
    )


def test_json_values_stay_json() -> None:
    (argument,) = arguments("""vllm serve m --hf-overrides '{"num_hidden_layers": 4}'""")
    assert json.loads(argument.partition("=")[2]) == {"num_hidden_layers": 4}


@pytest.mark.parametrize(
    ("written", "fix"),
    [
        ("--swap-space 16", "leave it out: preempted requests are computed again"),
        ("--rope_scaling {}", "write --hf-overrides"),
        ("--cuda-graph-sizes 8", "write --cudagraph-capture-sizes"),
        ("--tensor-parrallel-size 2", "did you mean --tensor-parallel-size"),
        ("--gobbledygook 2", "see vllm serve --help=all"),
    ],
)
def test_an_option_of_no_release_or_an_older_one_says_what_to_write(written: str, fix: str) -> None:
    with pytest.raises(ConfigError, match="has no such option; " + fix):
        parse_pasted(["vllm", "serve", "m", *written.split()])


def test_what_replaces_an_option_is_one() -> None:
    names = {name for option in serve_options("0.33") for name in option.names}
    for old, fix in REPLACED.items():
        assert old not in names
        written = [word.split(".")[0].rstrip(",") for word in fix.split() if word.startswith("--")]
        assert set(written) <= names
