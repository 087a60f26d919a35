"""What a span reads, and attention in steps against attention in one."""

import pytest
import torch

from kvledger import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from kvledger.core.tables import BlockTable
from kvledger.engine.kv_tensors import KVTensors
from kvledger.engine.paged_attention import (
    AttentionRule,
    GroupStep,
    PagedAttention,
    Span,
    attention,
    spelled_out_attention,
)
from kvledger.errors import BlockError, KVLedgerError

CPU = torch.device("cpu")


def readable(span: Span, window: int) -> list[str]:
    """The mask as text: a line for each query, x where it reads a key."""
    mask = span.mask(window, CPU)
    assert mask is not None
    return ["".join("x" if read else "." for read in line) for line in mask.tolist()]


def test_a_chunk_reads_everything_up_to_each_of_its_tokens() -> None:
    chunk = Span(row=0, offset=5, start=2, num_tokens=3)
    assert (chunk.end, chunk.batch, chunk.first_key(0)) == (5, slice(5, 8), 0)
    assert readable(chunk, 0) == ["xxx..", "xxxx.", "xxxxx"]


def test_a_window_counts_the_token_itself() -> None:
    chunk = Span(row=0, offset=0, start=6, num_tokens=3)
    # Token 6 reads 4, 5, 6; keys begin there.
    assert chunk.first_key(3) == 4
    assert readable(chunk, 3) == ["xxx..", ".xxx.", "..xxx"]
    assert Span(0, 0, 1, 2).first_key(3) == 0


def test_a_decode_and_a_prompt_from_its_start_need_no_mask() -> None:
    assert Span(0, 0, start=6, num_tokens=1).mask(3, CPU) is None
    assert Span(0, 0, start=0, num_tokens=3).mask(0, CPU) is None
    assert Span(0, 0, start=0, num_tokens=3).mask(3, CPU) is None
    # The fourth token does not read the first one.
    assert readable(Span(0, 0, start=0, num_tokens=4), 3) == ["x...", "xx..", "xxx.", ".xxx"]


def test_a_group_reads_pages_from_the_window_on() -> None:
    table = BlockTable(2, 4, 4)
    table.set_row(1, [0, 7, 8, 9])
    span = Span(row=1, offset=0, start=13, num_tokens=2)
    step = GroupStep(table, [span], CPU)
    assert list(zip(step.block_ids.tolist(), step.offsets.tolist(), strict=True)) == [(9, 1), (9, 2)]
    reading = step.reading(span, 6)
    # Token 13 reads from 8 on, which begins block 8; up to 14, in block 9.
    assert (reading.block_ids.tolist(), reading.first, reading.last) == ([8, 9], 0, 7)
    assert step.reading(span, 6) is reading
    with pytest.raises(BlockError, match="row 1: tokens 0 to 15 are read and the group keeps no block for some"):
        step.reading(span, 0)


def test_nothing_is_written_to_the_null_block() -> None:
    table = BlockTable(1, 4, 4)
    table.set_row(0, [0, 5])
    with pytest.raises(BlockError, match="a token of the step has only the null block"):
        GroupStep(table, [Span(0, 0, 2, 4)], CPU)


def test_a_layer_attends_once_a_step() -> None:
    """A layer that attends twice, as differential attention does, would lose what it kept first."""
    spec = FullAttentionSpec(4, 1, 2, dtype="float32")
    tensors = KVTensors(KVCacheConfig(3, (KVCacheGroupSpec(("a", "b"), spec),)))
    table = BlockTable(1, 1, 4)
    table.set_row(0, [2])
    step = PagedAttention(tensors, [table], [Span(0, 0, 0, 1)])
    read = step.attend("a", torch.ones(1, 1, 2), torch.ones(1, 1, 2), torch.full((1, 1, 2), 3.0), AttentionRule(1.0))
    assert read.tolist() == [[[3.0, 3.0]]]
    assert step.silent_layers() == ["b"]
    with pytest.raises(KVLedgerError, match="layer a attends twice in a step"):
        step.attend("a", read, read, read, AttentionRule(1.0))


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("span", [Span(0, 0, 7, 3), Span(0, 0, 0, 10), Span(0, 0, 9, 1)])
def test_attention_in_steps_is_attention(num_kv_heads: int, span: Span) -> None:
    torch.manual_seed(0)
    query, key = torch.randn(span.num_tokens, 4, 8), torch.randn(10, num_kv_heads, 8)
    value = torch.randn(10, num_kv_heads, 6)
    rule = AttentionRule(scale=0.3)
    found = spelled_out_attention(query, key, value, span.mask(0, CPU), rule)
    torch.testing.assert_close(found, attention(query, key, value, span.mask(0, CPU), rule))
    # The first query by hand, with its first head: it reads the tokens up to its own.
    scores = (key[: span.start + 1, 0] @ query[0, 0]) * 0.3
    torch.testing.assert_close(found[0, 0], scores.softmax(0) @ value[: span.start + 1, 0])


def test_a_cap_bounds_scores() -> None:
    """One query and two keys: scores 100 and -100, capped to 1 and -1; the first weight is e / (e + 1 / e)."""
    query, key, value = torch.tensor([[[10.0]]]), torch.tensor([[[10.0]], [[-10.0]]]), torch.tensor([[[1.0]], [[0.0]]])
    read = attention(query, key, value, None, AttentionRule(scale=1.0, softcap=1.0))
    assert read.item() == pytest.approx(2.718281828**2 / (2.718281828**2 + 1))


def test_a_sink_takes_its_share_and_gives_nothing() -> None:
    """Two equal scores and an equal sink: each key has a third of the weight."""
    query, key, value = torch.zeros(1, 1, 1), torch.zeros(2, 1, 1), torch.ones(2, 1, 1)
    read = attention(query, key, value, None, AttentionRule(scale=1.0, sinks=torch.zeros(1)))
    assert read.item() == pytest.approx(2 / 3)
