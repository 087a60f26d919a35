"""PagedAttention: attention of one step over block tables, for a flat batch of prompt chunks and decodes.

The batch has no rows and no padding: the tokens of all requests stand one behind the other, and a Span says whose are
where.

    tokens     | a: 5 6 7 | b: 91 | c: 0 1 2 3 ... |      positions in their own sequences
    offset       0          3       4

For each layer the new keys and values go to their slots first; then every request reads its own pages, and only those
that attention reaches: nothing behind a window, nothing of blocks that are not its own, nothing not written yet.
"""

from dataclasses import dataclass
from typing import Final

import numpy
import torch
from torch.nn import functional

from kvledger.core.tables.block_table import BlockTable
from kvledger.core.tables.slots import slot_mapping
from kvledger.core.units import cdiv
from kvledger.engine.kv_tensors import KVTensors, LayerTensors
from kvledger.errors import BlockError, KVLedgerError


@dataclass(frozen=True)
class Span:
    """One request's tokens of a step: [start, start + num_tokens) of its sequence, from `offset` on in the batch.

    `row`: its row in the block tables.
    """

    row: int
    offset: int
    start: int
    num_tokens: int

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    @property
    def batch(self) -> slice:
        """Where its tokens are in the batch."""
        return slice(self.offset, self.offset + self.num_tokens)

    def first_key(self, window: int) -> int:
        """The first token that its first one reads. `window` 0: all before it."""
        return max(0, self.start - window + 1) if window else 0

    def mask(self, window: int, device: torch.device) -> torch.Tensor | None:
        """bool [num_tokens, keys from first_key on], True where a token reads a key.

        None where that is nothing but the order of the tokens: a single one, and a sequence from its start within a
        window. Kernels know that case and skip half of the work.
        """
        if self.num_tokens == 1 or (self.start == 0 and (window == 0 or self.num_tokens <= window)):
            return None
        queries = torch.arange(self.start, self.end, device=device).unsqueeze(1)
        keys = torch.arange(self.first_key(window), self.end, device=device)
        readable = keys <= queries
        return readable & (keys > queries - window) if window else readable


@dataclass(frozen=True)
class AttentionRule:
    """How a layer attends. `window` 0: all earlier tokens. `softcap` 0: scores are not bounded.

    `sinks`: [heads], scores that take part in the softmax and stand for nothing (gpt-oss).
    """

    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: torch.Tensor | None = None


@dataclass(frozen=True)
class Reading:
    """What one request reads in the layers of a group that have the same window.

    Of the pages `block_ids`, side by side, tokens [first, last) count; `mask` is bool [queries, last - first], or None
    (Span.mask).
    """

    block_ids: torch.Tensor
    first: int
    last: int
    mask: torch.Tensor | None

    def gather(self, layer: LayerTensors) -> torch.Tensor:
        """[tokens, KV heads, key size + value size]."""
        return layer.pages.index_select(0, self.block_ids).flatten(0, 1)[self.first : self.last]


class PagedAttention:
    """One step. REQUIRES that the block tables have the step's ids already and do not change while the model runs."""

    def __init__(self, tensors: KVTensors, tables: list[BlockTable], spans: list[Span]) -> None:
        self.layers: Final = tensors.layers
        self._spans: Final = spans
        self._groups: Final = [GroupStep(table, spans, tensors.device) for table in tables]
        self._attended: Final[set[str]] = set()

    def attend(
        self, layer_name: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: AttentionRule
    ) -> torch.Tensor:
        """Keeps the new keys and values, and returns what the queries read.

        query [tokens, heads, head size], key and value [tokens, KV heads, head size] -> [tokens, heads, value size].
        """
        if layer_name in self._attended:
            raise KVLedgerError(
                f"layer {layer_name} attends twice in a step: what it keeps for the first time would be lost; use a "
                "model that attends once a layer"
            )
        self._attended.add(layer_name)
        layer = self.layers[layer_name]
        group = self._groups[layer.group_id]
        layer.keys[group.block_ids, group.offsets] = key.to(layer.pages.dtype)
        layer.values[group.block_ids, group.offsets] = value.to(layer.pages.dtype)
        read = query.new_empty(*query.shape[:2], layer.values.shape[-1])
        for span in self._spans:
            reading = group.reading(span, rule.window)
            gathered = reading.gather(layer).to(query.dtype)
            keys, values = gathered.tensor_split((layer.spec.head_size,), dim=-1)
            read[span.batch] = attention(query[span.batch], keys, values, reading.mask, rule)
        return read

    def silent_layers(self) -> list[str]:
        """Layers that have not attended: after the model ran, those that keep their values somewhere else."""
        return [name for name in self.layers if name not in self._attended]


class GroupStep:
    """What a step writes and reads in one group: the same for all of its layers, so it is worked out once."""

    def __init__(self, table: BlockTable, spans: list[Span], device: torch.device) -> None:
        self._block_size: Final = table.block_size
        self._device: Final = device
        self._table: Final = numpy.asarray(table.view())
        self._readings: Final[dict[tuple[int, int], Reading]] = {}
        rows = [span.row for span in spans]
        starts, num_tokens = [span.start for span in spans], [span.num_tokens for span in spans]
        slots = numpy.asarray(slot_mapping(table, rows, starts, num_tokens))
        if (slots < 0).any():
            raise BlockError("a token of the step has only the null block: the tables miss an output of the scheduler")
        self.block_ids: Final = torch.tensor(slots // self._block_size, device=device)
        self.offsets: Final = torch.tensor(slots % self._block_size, device=device)

    def reading(self, span: Span, window: int) -> Reading:
        """What the request of that span reads under that window (0: none)."""
        reading = self._readings.get((span.row, window))
        if reading is None:
            reading = self._readings[span.row, window] = self._new_reading(span, window)
        return reading

    def _new_reading(self, span: Span, window: int) -> Reading:
        first_key = span.first_key(window)
        first_page = first_key // self._block_size
        block_ids = self._table[span.row, first_page : cdiv(span.end, self._block_size)]
        if (block_ids <= 0).any():
            raise BlockError(
                f"row {span.row}: tokens {first_key} to {span.end} are read and the group keeps no block for some of "
                "them: its spec's window is smaller than the model's, or the tables miss an output of the scheduler"
            )
        skipped = first_page * self._block_size
        mask = span.mask(window, self._device)
        return Reading(torch.tensor(block_ids, device=self._device), first_key - skipped, span.end - skipped, mask)


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, rule: AttentionRule
) -> torch.Tensor:
    """Attention of one request: query [tokens, heads, size] over key and value [keys, KV heads, size].

    Without a mask there is one query, or as many as keys, each of which reads up to its own.
    """
    if rule.softcap or rule.sinks is not None:
        return spelled_out_attention(query, key, value, mask, rule)
    read = functional.scaled_dot_product_attention(
        query.transpose(0, 1).unsqueeze(0),
        key.transpose(0, 1).unsqueeze(0),
        value.transpose(0, 1).unsqueeze(0),
        attn_mask=mask,
        is_causal=mask is None and query.shape[0] > 1,
        scale=rule.scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return read.squeeze(0).transpose(0, 1)


def spelled_out_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, rule: AttentionRule
) -> torch.Tensor:
    """The same in steps, for what torch's function does not offer: bounded scores (Gemma 2) and sinks (gpt-oss)."""
    num_heads, num_kv_heads = query.shape[1], key.shape[1]
    grouped = query.reshape(query.shape[0], num_kv_heads, num_heads // num_kv_heads, query.shape[2])
    scores = torch.einsum("qhgd,khd->hgqk", grouped, key) * rule.scale
    if rule.softcap:
        scores = torch.tanh(scores / rule.softcap) * rule.softcap
    if mask is None:
        mask = torch.ones(query.shape[0], key.shape[0], dtype=torch.bool, device=query.device)
        mask = mask.tril(key.shape[0] - query.shape[0])
    scores = scores.masked_fill(~mask, float("-inf"))
    if rule.sinks is not None:
        sinks = rule.sinks.to(scores.dtype).view(num_kv_heads, -1, 1, 1).expand(-1, -1, scores.shape[2], 1)
        scores = torch.cat((scores, sinks), dim=-1)
    weights = scores.softmax(dim=-1, dtype=torch.float32).to(value.dtype)[..., : key.shape[0]]
    return torch.einsum("hgqk,khd->qhgd", weights, value).flatten(1, 2)
