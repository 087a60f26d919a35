"""What do I need: users and a context -> cards, each answer a plan that somebody could make by hand."""

from dataclasses import replace
from math import ceil
from typing import Any

import pytest

from kvledger.errors import ConfigError
from kvledger.plan.ask import Asked, build_request
from kvledger.plan.need import Answer, Need, answers, command, parse_need, parse_prices
from kvledger.plan.options import EngineOptions
from kvledger.plan.plan import make_plan
from kvledger.plan.request import request_holding

LLAMA = "meta-llama/Llama-3.1-8B"


def ask(model: str = LLAMA, gpu: str | None = None, **options: Any) -> Asked:
    return Asked(model, gpu, None, EngineOptions(**options), given=frozenset(options))


def answer(users: int, context: int, asked: Asked, prices: dict[str, float] | None = None) -> list[Answer]:
    return answers(asked, Need(users, context), prices or {})


def test_one_card_for_the_users_that_its_blocks_hold() -> None:
    # 28,134 blocks on an H100 with 8,192 batched tokens; a request of 4,000 tokens holds 250.
    (best,) = answer(100, 4000, ask(gpu="H100"))
    assert (best.num_cards, best.replicas, best.plan.num_blocks) == (1, 1, 28_134)
    assert best.users == (28_134 - 1) // 250 == 112
    assert best.margin == pytest.approx(0.12)
    assert best.longest == 131_072


def test_users_beyond_one_replica_take_more_of_them_and_larger_ones_are_tried() -> None:
    # One H100 holds 112, so 225 users would take three; two that share the weights hold more than twice as many.
    (best,) = answer(225, 4000, ask(gpu="H100"))
    assert (best.plan.request.options.tensor_parallel_size, best.replicas, best.num_cards) == (2, 1, 2)
    assert best.users >= 225


@pytest.mark.parametrize("users", [1, 37, 500])
@pytest.mark.parametrize("context", [2_000, 30_000])
def test_every_answer_is_a_plan_that_fits_with_one_replica_less_it_would_not(users: int, context: int) -> None:
    for way in answer(users, context, ask("Qwen/Qwen3-32B", "L4,H100,MI300X")):
        again = make_plan(build_request(ask("Qwen/Qwen3-32B", way.card, **sizes(way), max_model_len=context)))
        each = min(request_holding(again, context - 1, 1).at_a_time, again.settings.max_num_seqs)
        assert again.error is None
        assert again.num_blocks == way.plan.num_blocks
        assert way.replicas == ceil(users / each)
        assert way.users == each * way.replicas >= users
        assert way.surely <= way.users
        assert way.longest >= context


def sizes(way: Answer) -> dict[str, int]:
    options = way.plan.request.options
    return {
        "tensor_parallel_size": options.tensor_parallel_size,
        "pipeline_parallel_size": options.pipeline_parallel_size,
    }


def test_prices_rank_before_numbers_of_cards_and_cards_without_one_come_last() -> None:
    prices = parse_prices("H100=2.5, L4=0.1")
    ranked = answer(50, 8000, ask(gpu="H200,H100,L4"), prices)
    assert [way.card for way in ranked] == ["NVIDIA L4", "NVIDIA H100 80GB HBM3 (SXM)", "NVIDIA H200 (SXM) / H200 NVL"]
    assert [way.price for way in ranked] == [pytest.approx(0.1 * ranked[0].num_cards), 2.5, None]
    by_cards = answer(50, 8000, ask(gpu="H200,H100,L4"))
    assert [way.num_cards for way in by_cards] == sorted(way.num_cards for way in by_cards)


def test_seats_bound_users_as_blocks_do() -> None:
    (best,) = answer(64, 1000, ask(gpu="H100", max_num_seqs=16))
    assert (best.replicas, best.users) == (4, 64)


def test_given_ranks_are_kept() -> None:
    (best,) = answer(10, 4000, ask(gpu="H100", tensor_parallel_size=4))
    assert (best.num_cards, best.replicas) == (4, 1)


def test_replicas_that_share_experts_are_counted_together() -> None:
    # 641 GiB of weights do not fit on a card, nor on eight: experts over eight replicas do on an H200.
    asked = ask("deepseek-ai/DeepSeek-V3", "H200", enable_expert_parallel=True, tensor_parallel_size=1)
    (best,) = answer(100, 32_000, asked)
    assert (best.num_cards, best.replicas, best.plan.request.options.data_parallel_size) == (8, 8, 8)
    with pytest.raises(ConfigError, match="holds it: No available memory"):
        answer(100, 32_000, replace(asked, options=EngineOptions()))


def test_the_command_says_what_was_asked_besides() -> None:
    (best,) = answer(300, 32_000, ask("Qwen/Qwen3-32B", "H100", kv_cache_dtype="fp8", enable_prefix_caching=False))
    assert command(best) == (
        "vllm serve Qwen/Qwen3-32B --max-model-len 32000 --kv-cache-dtype fp8 --tensor-parallel-size 8 "
        "--data-parallel-size 3 --no-enable-prefix-caching"
    )


@pytest.mark.parametrize("name", ["data_parallel_size", "kv_cache_memory_bytes", "num_gpu_blocks_override"])
def test_what_is_asked_cannot_be_given(name: str) -> None:
    with pytest.raises(ConfigError, match="--need finds it out; leave it out"):
        answer(10, 4000, ask(**{name: 4}))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("users=200", "context is missing or too small"),
        ("context=32k", "users is missing or too small"),
        ("users=0,context=32k", "users is missing or too small"),
        ("users=2,context=1", "context is missing or too small"),
        ("users=2,contxt=1", "'contxt=1' is not users=N or context=N"),
        ("200,32k", "'200' is not users=N or context=N"),
    ],
)
def test_a_wrong_need_says_how_it_is_written(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as error:
        parse_need(text)
    assert "users=200,context=32k" in str(error.value)


def test_a_need_reads_letters_behind_numbers_as_vllm_does() -> None:
    assert parse_need("context=32k, users=200") == Need(200, 32_000)
    assert parse_need("context=32K,users=2") == Need(2, 32_768)


@pytest.mark.parametrize("text", ["H100", "H100=0", "H100=-1", "H100=much", "abacus=1"])
def test_a_wrong_price_is_an_error(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--prices|abacus"):
        parse_prices(text)


def test_nobody_is_served_where_no_card_holds_a_request() -> None:
    with pytest.raises(ConfigError, match=r"no card of L4 holds it: .*divisible"):
        answer(1, 4000, ask("Qwen/Qwen3-32B", "L4", tensor_parallel_size=3))
