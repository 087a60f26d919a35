"""What an engine decides by itself: batches, kernels, block sizes, refusals; and what the options check."""

import pytest

from kvledger.errors import ConfigError
from kvledger.plan.ask import Asked, build_request
from kvledger.plan.gpus import find_gpu, gpus
from kvledger.plan.memory import MeasuredMemory
from kvledger.plan.options import EngineOptions
from kvledger.plan.plan import make_plan
from kvledger.plan.pool import longest_that_fits, pipeline_stages
from kvledger.plan.refusal import HEADS, NO_BACKEND, TOO_LONG, RefusedError
from kvledger.plan.versions import tokens_by_concurrency, version_rules
from tests.unit.plan.planning import facts, gib, made_up, plan, request


@pytest.mark.parametrize(
    ("gpu", "entry_point", "batched", "seqs"),
    [
        ("B200", "server", 16384, 1024),
        ("H100", "server", 8192, 1024),
        ("H100", "llm", 16384, 1024),
        ("A100", "server", 2048, 256),
        ("A100", "llm", 8192, 256),
        ("L4", "server", 2048, 256),
    ],
)
def test_batches_by_card_and_entry_point(gpu: str, entry_point: str, batched: int, seqs: int) -> None:
    settings = plan(made_up(), gpu=gpu, entry_point=entry_point).settings
    assert (settings.max_num_batched_tokens, settings.max_num_seqs) == (batched, seqs)


def test_tokens_in_flight_by_stages_and_scheduling() -> None:
    assert plan(made_up()).settings.max_in_flight_tokens == 2 * 8192
    assert plan(made_up(), async_scheduling=False).settings.max_in_flight_tokens == 8192
    assert plan(made_up(), pipeline_parallel_size=4).settings.max_in_flight_tokens == 5 * 8192


def test_small_windows_reserve_what_is_in_flight() -> None:
    model = made_up(model_type="mistral", sliding_window=1024)
    small, large = (plan(model, kv_cache_memory_bytes=gib(1), max_num_batched_tokens=tokens) for tokens in (256, 2048))
    assert small.blocks_per_request == (1023 + 512 + 15) // 16 + 1
    assert large.blocks_per_request == (1023 + 4096 + 15) // 16 + 1


@pytest.mark.parametrize(
    ("gpu", "dtype", "name", "block_size"),
    [
        ("H100", "auto", "FLASH_ATTN_MLA", 16),
        ("H100", "fp8", "FLASHMLA", 64),
        ("A100", "auto", "TRITON_MLA", 16),
        ("B200", "auto", "FLASHINFER_MLA", 32),
    ],
)
def test_kernels_of_latent_attention(gpu: str, dtype: str, name: str, block_size: int) -> None:
    made = plan(
        facts("deepseek-ai/DeepSeek-V3", quantized=False), gpu=gpu, kv_cache_dtype=dtype, tensor_parallel_size=8
    )
    assert (made.settings.backend.name, made.block_size) == (name, block_size)


def test_packed_latents_of_sparse_attention() -> None:
    made = plan(
        facts("deepseek-ai/DeepSeek-V3.2", quantized=False), kv_cache_dtype="fp8", kv_cache_memory_bytes=gib(40)
    )
    assert made.bytes_per_block == 61 * 64 * (656 + 132)


@pytest.mark.parametrize(
    ("gpu", "options"), [("A100", {}), ("H100", {"kv_cache_dtype": "fp8_e4m3"}), ("H100", {"block_size": 32})]
)
def test_sparse_attention_needs_its_kernels(gpu: str, options: dict[str, object]) -> None:
    with pytest.raises(RefusedError) as refused:
        plan(facts("deepseek-ai/DeepSeek-V3.2", quantized=False), gpu=gpu, **options)
    assert refused.value.refusal.kind == NO_BACKEND


def test_heads_must_be_divisible() -> None:
    with pytest.raises(
        RefusedError, match=r"attention heads \(28\) must be divisible by tensor parallel size \(8\)"
    ) as refused:
        plan("Qwen/Qwen2-7B", tensor_parallel_size=8)
    assert refused.value.refusal.kind == HEADS


def test_length_beyond_the_models_is_refused() -> None:
    with pytest.raises(RefusedError, match="max_position_embeddings=8192") as refused:
        plan("google/gemma-2-9b", max_model_len=32768)
    assert refused.value.refusal.kind == TOO_LONG


def test_context_parallel_ranks_share_the_tokens_of_latents() -> None:
    model = facts("deepseek-ai/DeepSeek-V3", quantized=False)
    alone, shared = (
        plan(model, tensor_parallel_size=8, decode_context_parallel_size=ranks, kv_cache_memory_bytes=gib(40))
        for ranks in (1, 8)
    )
    assert alone.bytes_per_block == shared.bytes_per_block
    assert shared.blocks_per_request == alone.blocks_per_request / 8


def test_latents_are_whole_on_every_rank_and_heads_are_not() -> None:
    latent = facts("deepseek-ai/DeepSeek-V3", quantized=False)
    assert (
        len({plan(latent, tensor_parallel_size=size, kv_cache_memory_bytes=gib(40)).num_blocks for size in (1, 8)}) == 1
    )
    plain = facts("Qwen/Qwen3-8B")
    one, eight = (plan(plain, tensor_parallel_size=size, kv_cache_memory_bytes=gib(40)) for size in (1, 8))
    assert one.bytes_per_block == 8 * eight.bytes_per_block


def test_tensor_parallelism_shards_states_and_pipelines_do_not() -> None:
    sharded = plan("Qwen/Qwen3.5-27B", tensor_parallel_size=4, kv_cache_memory_bytes=gib(40))
    staged = plan("Qwen/Qwen3.5-27B", pipeline_parallel_size=4, kv_cache_memory_bytes=gib(40))
    alone = plan("Qwen/Qwen3.5-27B", kv_cache_memory_bytes=gib(40))
    assert staged.block_size == alone.block_size == sharded.block_size
    assert staged.bytes_per_block * 4 == alone.bytes_per_block == sharded.bytes_per_block * 4


def test_uneven_stages_leave_the_ends_short() -> None:
    assert [len(stage) for stage in pipeline_stages(10, 4)] == [2, 3, 3, 2]
    assert [len(stage) for stage in pipeline_stages(7, 2)] == [4, 3]
    assert pipeline_stages(6, 2, (1, 5)) == [range(1), range(1, 6)]


def test_longest_is_found_by_search() -> None:
    assert longest_that_fits(1000, lambda length: length <= 137) == 137
    assert longest_that_fits(1000, lambda length: True) == 1000
    assert longest_that_fits(1000, lambda length: False) == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"gpu_memory_utilization": 1.5},
        {"tensor_parallel_size": 0},
        {"block_size": 0},
        {"num_gpu_blocks_override": 1},
        {"max_model_len": 0},
        {"kv_cache_dtype": "int4"},
        {"entry_point": "batch"},
        {"tensor_parallel_size": 4, "decode_context_parallel_size": 3},
        {"pipeline_parallel_size": 2, "pipeline_layers": (4,)},
    ],
)
def test_wrong_option_names_itself_and_the_fix(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"--[a-z-]+=.*: .+; .+"):
        EngineOptions(**wrong)  # type: ignore[arg-type]


def test_partition_must_cover_the_model() -> None:
    asked = request(made_up(), pipeline_parallel_size=2, pipeline_layers=(1, 2))
    with pytest.raises(ConfigError, match="3 layers in all and the model has 4"):
        make_plan(asked)


@pytest.mark.parametrize("name", ["H100", "h200", "a100-80gb", "RTX 4090", "l40s", "MI300X", "B200"])
def test_cards_by_the_names_people_use(name: str) -> None:
    assert find_gpu(name).total_bytes > gib(20)


def test_ambiguous_and_unknown_cards_list_candidates() -> None:
    with pytest.raises(ConfigError, match="several cards match"):
        find_gpu("RTX")
    with pytest.raises(ConfigError, match="kv-cache-memory-bytes"):
        find_gpu("Quantum 9000")


def test_every_card_has_a_source_and_the_unsure_are_marked() -> None:
    assert all(gpu.source for gpu in gpus())
    assert any(not gpu.sourced for gpu in gpus())
    assert find_gpu("H100").sourced


def test_release_rules() -> None:
    assert version_rules("0.33.1").name == "0.33"
    with pytest.raises(ConfigError, match=r"0\.33 or 0\.32"):
        version_rules("0.10")
    assert [tokens_by_concurrency(version) for version in ("0.19.1", "0.20.0", "main", None)] == [
        False,
        True,
        None,
        None,
    ]


# Names as people write them -> the card, or the first words of what is said.
CARDS = {
    "5070 Ti": "NVIDIA GeForce RTX 5070 Ti",
    "RTX 5070": "NVIDIA GeForce RTX 5070",
    "rtx-4080": "NVIDIA GeForce RTX 4080",
    "4080 SUPER": "NVIDIA GeForce RTX 4080 SUPER",
    "3090 Ti": "NVIDIA GeForce RTX 3090 Ti",
    "3090": "NVIDIA GeForce RTX 3090",
    "Strix Halo": "AMD Ryzen AI Max+ 395 / Strix Halo (Radeon 8060S)",
    "Jetson Thor": "NVIDIA Jetson AGX Thor",
    "DGX Spark": "NVIDIA GB10 / DGX Spark",
    "RTX PRO 6000": "NVIDIA RTX PRO 6000 Blackwell (Server/Workstation)",
    "RTX PRO 5000 72GB": "NVIDIA RTX PRO 5000 Blackwell 72GB",
    "MI325X": "AMD Instinct MI325X",
    "MI355X": "AMD Instinct MI355X",
    "T4": "Tesla T4",
    "h100-pcie": "NVIDIA H100 PCIe 80GB",
}


@pytest.mark.parametrize("name", CARDS)
def test_a_card_is_not_its_neighbour(name: str) -> None:
    assert find_gpu(name).name == CARDS[name]


def test_every_name_of_the_table_finds_its_row() -> None:
    for gpu in gpus():
        assert find_gpu(gpu.name) == gpu


@pytest.mark.parametrize(("size", "low", "high"), [("24GB", 21.9, 24), ("16 gb", 14.6, 16), ("80GiB", 73, 80)])
def test_a_card_by_its_size_alone(size: str, low: float, high: float) -> None:
    card = find_gpu(size)
    assert gib(low) - 1 <= card.low_bytes < card.total_bytes < card.high_bytes <= gib(high)
    # Every card of the table with that many GB on its box lies in the range.
    for name in {"24GB": ("L4", "4090", "3090 Ti", "A10"), "16 gb": ("5080", "4080"), "80GiB": ("H100", "A100")}[size]:
        assert card.low_bytes <= find_gpu(name).total_bytes <= card.high_bytes


def test_measured_memory_is_enough_of_a_card() -> None:
    asked = Asked("Qwen/Qwen3-8B", None, None, EngineOptions(), MeasuredMemory(total_bytes=gib(15.9)))
    request = build_request(asked)
    assert request.gpu.total_bytes == gib(15.9)
    assert any("a card of 15.9 GiB: kernels are those of" in note for note in request.facts.config.notes)


@pytest.mark.parametrize(
    ("model", "gpu", "words"),
    [
        ("Qwen/Qwen3-8B", "MI300X", "planned with the rules of CUDA cards"),
        ("Qwen/Qwen3-8B", "Google TPU v6e", "planned with the rules of CUDA cards"),
        ("Qwen/Qwen3-8B", "Intel Gaudi 3", "planned with the rules of CUDA cards"),
        ("Qwen/Qwen3-8B", "24GB", "--gpu names one"),
        ("deepseek-ai/DeepSeek-V4-Flash", "A100", "are for compute capability 9.0 and 10.x"),
    ],
)
def test_what_is_not_known_of_a_card_is_said(model: str, gpu: str, words: str) -> None:
    notes = build_request(Asked(model, gpu, None, EngineOptions())).facts.config.notes
    assert any(words in note for note in notes)
    silent = build_request(Asked(model, "H200", None, EngineOptions())).facts.config.notes
    assert not any(words in note for note in silent)
