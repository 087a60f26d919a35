"""Prompts share exactly as the trace says, hashed or named, whatever the two block sizes are."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kvledger.core.requests.request import Request
from kvledger.traces.prompts import make_prompt_maker, output_token
from kvledger.traces.trace_request import TraceRequest


def recorded(num_prompt: int, ids: list[int], trace_block: int, *, scope: int = 0, num_output: int = 1) -> TraceRequest:
    return TraceRequest(0.0, num_prompt, num_output, ids, trace_block, scope)


def make(hash_name: str, block_size: int, *requests: TraceRequest) -> list[Request]:
    """The requests with the names of their full prompt blocks."""
    maker = make_prompt_maker(hash_name, block_size)
    made = [maker.make(request, serial) for serial, request in enumerate(requests)]
    for request in made:
        maker.hasher.refresh(request)
    return made


def num_shared(one: Request, other: Request, block_size: int) -> int:
    """Leading full prompt blocks with equal names."""
    num = 0
    for ours, theirs in zip(one.block_hashes, other.block_hashes, strict=False):
        in_prompts = (num + 1) * block_size <= min(one.num_prompt_tokens, other.num_prompt_tokens)
        if ours != theirs or not in_prompts:
            break
        num += 1
    return num


def test_two_prompts_share_the_blocks_whose_ids_they_share() -> None:
    # R1 = ids 1 2 3, R2 = ids 1 2 4, 512 tokens each: 1024 tokens in common, 64 blocks of 16.
    one, other = recorded(1536, [1, 2, 3], 512), recorded(1536, [1, 2, 4], 512)
    for hash_name in ("sha256", "none"):
        assert num_shared(*make(hash_name, 16, one, other), 16) == 64


def test_a_partial_trace_block_shares_its_whole_engine_blocks() -> None:
    # 40 tokens of id 2 are two whole blocks of 16 and a rest.
    one, other = recorded(552, [1, 2], 512), recorded(1024, [1, 2], 512)
    for hash_name in ("sha256", "none"):
        assert num_shared(*make(hash_name, 16, one, other), 16) == 34


def test_an_engine_block_across_trace_blocks_needs_both_ids() -> None:
    # Blocks of 48 in trace blocks of 64: block 1 covers tokens 48 to 95, of ids 1 and 2.
    one, other = recorded(192, [1, 2, 3], 64), recorded(192, [1, 9, 3], 64)
    for hash_name in ("sha256", "none"):
        assert num_shared(*make(hash_name, 48, one, other), 48) == 1


def test_the_same_id_after_another_prefix_is_another_block() -> None:
    one, other = recorded(128, [1, 2], 64), recorded(128, [3, 2], 64)
    for hash_name in ("sha256", "none"):
        first, second = make(hash_name, 64, one, other)
        assert not set(first.block_hashes) & set(second.block_hashes)


def test_scopes_keep_equal_ids_apart() -> None:
    one, other = recorded(64, [1], 64, scope=1), recorded(64, [1], 64, scope=2)
    for hash_name in ("sha256", "none"):
        assert num_shared(*make(hash_name, 16, one, other), 16) == 0


def test_tokens_without_an_id_are_nobody_elses() -> None:
    one, other = recorded(128, [1], 64), recorded(128, [1], 64)
    for hash_name in ("sha256", "none"):
        assert num_shared(*make(hash_name, 16, one, other), 16) == 4


def test_named_blocks_reach_to_the_last_generated_token_and_hold_no_content() -> None:
    (request,) = make("none", 16, recorded(64, [1], 64, num_output=32))
    assert len(request.block_hashes) == 6
    assert request.tokens.pack(0, 64) == bytes(256)


def test_prompts_are_packed_as_numbers_of_their_ids() -> None:
    (request,) = make("sha256", 16, recorded(100, [70, 80], 64))
    # Ids are numbered as they come up.
    assert request.tokens.token_ids(0, 100) == [0] * 64 + [1] * 36


def test_what_a_request_generates_is_its_own() -> None:
    assert output_token(0) != output_token(1)


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.lists(
        st.tuples(st.lists(st.integers(0, 3), min_size=1, max_size=5), st.integers(0, 11), st.integers(0, 1)),
        min_size=2,
        max_size=6,
    ),
    block_size=st.integers(1, 30),
)
def test_names_and_hashes_agree_on_every_pair(prompts: list[tuple[list[int], int, int]], block_size: int) -> None:
    """Ids that name content only, lengths that cut anywhere, two scopes: equal hashes exactly where names are equal."""
    requests = [recorded(len(ids) * 12 - cut, ids, 12, scope=scope, num_output=5) for ids, cut, scope in prompts]
    hashed = make("sha256", block_size, *requests)
    named = make("none", block_size, *requests)
    for i in range(len(requests)):
        for j in range(i):
            assert num_shared(hashed[i], hashed[j], block_size) == num_shared(named[i], named[j], block_size)
