"""What workers do with block tables, in names instead of numbers: which content lies in which slot of which block.

The value of a token depends on all tokens up to it, so its name is the number of that prefix; a recurrent state is
named by the prefix that it stands for. Nothing of the ledger's bookkeeping is used: only specs, block tables and copy
orders.
"""

from kvledger import BlockCopy, KVCacheSpec
from kvledger.core.groups.spec import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    CrossAttentionSpec,
    MambaSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)

Table = list[int]


class Sequence:
    """A sequence as the workers know it: `tokens` may run ahead of what the scheduler has been told."""

    def __init__(self, key: str, tokens: list[int], num_encoder_tokens: int) -> None:
        self.key, self.tokens, self.num_encoder_tokens = key, tokens, num_encoder_tokens
        self.num_done = 0
        self.encoder_written = False
        self.verifies_drafts = False
        # Group -> block in which the state after num_done tokens lies.
        self.state_block: dict[int, int] = {}


class Worker:
    def __init__(self, specs: list[KVCacheSpec], block_sizes: list[int]) -> None:
        self.specs, self.block_sizes = specs, block_sizes
        self.prefixes: dict[tuple[int, int], int] = {}
        self.slots: list[dict[tuple[int, int], object]] = [{} for _ in specs]
        self.num_garbage = 0

    def name(self, tokens: list[int], num_tokens: int) -> int:
        """The name of that prefix; equal prefixes have equal names."""
        prefix = 0
        for token in tokens[:num_tokens]:
            prefix = self.prefixes.setdefault((prefix, token), len(self.prefixes) + 1)
        return prefix

    def names(self, tokens: list[int]) -> list[int]:
        names: list[int] = []
        prefix = 0
        for token in tokens:
            prefix = self.prefixes.setdefault((prefix, token), len(self.prefixes) + 1)
            names.append(prefix)
        return names

    def garbage(self) -> object:
        self.num_garbage += 1
        return f"garbage {self.num_garbage}"

    def write(self, group: int, block: int, offset: int, content: object) -> None:
        assert block != 0, f"group {group}: the null block is written to"
        # Blocks move from group to group, and their old content is gone as soon as somebody writes.
        for other, slots in enumerate(self.slots):
            if other != group and not self.has_own_pool(group) and not self.has_own_pool(other):
                slots.pop((block, offset), None)
        self.slots[group][block, offset] = content

    def has_own_pool(self, group: int) -> bool:
        return hasattr(self.specs[group], "num_host_blocks")

    def copy(self, copies: list[BlockCopy]) -> None:
        """In the order of the list, each whole block at once."""
        for copy in copies:
            slots = self.slots[copy.group_id]
            source, target = copy.source_block_id, copy.target_block_id
            for offset in range(self.block_sizes[copy.group_id]):
                content = slots.get((source, offset), None)
                self.write(copy.group_id, target, offset, self.garbage() if content is None else content)

    def fork(self, parent: Sequence, child: Sequence, parent_tables: list[Table], child_tables: list[Table]) -> None:
        """What the child must know of its parent: its encoder, and which of its states counts."""
        child.key, child.encoder_written = parent.key, True
        for group, block in parent.state_block.items():
            child.state_block[group] = child_tables[group][parent_tables[group].index(block)]

    # A step of one sequence: tokens [start, start + num_drafts + 1) or a chunk of its prompt

    def load(self, seq: Sequence, tables: list[Table], start: int, end: int) -> None:
        """A connector delivers tokens [start, end) wherever the ledger gave them a block."""
        names = self.names(seq.tokens[:end])
        for group, spec in enumerate(self.specs):
            size, table = self.block_sizes[group], tables[group]
            if isinstance(spec, (CrossAttentionSpec, CircularBufferSpec)):
                continue
            if isinstance(spec, MambaSpec):
                self.write(group, table[(end - 1) // size], 0, names[end - 1])
                continue
            for position in range(start, end):
                if position // size < len(table) and table[position // size] != 0:
                    self.write(group, table[position // size], position % size, names[position])
        seq.num_done = end

    def attend(self, seq: Sequence, tables: list[Table], num_new: int, num_lookahead: int, num_known: int) -> None:
        """Writes values of all new tokens, then reads what attention reads for those whose result counts.

        `num_known`: tokens from the start that are no rejected drafts. Slots beyond are written by drafters.
        """
        start = seq.num_done
        end = start + num_new
        names = self.names(seq.tokens[:num_known])
        for group, spec in enumerate(self.specs):
            size, table = self.block_sizes[group], tables[group]
            if isinstance(spec, MambaSpec):
                continue
            if isinstance(spec, CrossAttentionSpec):
                for position in range(seq.num_encoder_tokens):
                    if not seq.encoder_written:
                        self.write(group, table[position // size], position % size, (seq.key, position))
                    found = self.slots[group].get((table[position // size], position % size))
                    assert found == (seq.key, position), f"encoder token {position} is {found}"
                continue
            if isinstance(spec, CircularBufferSpec):
                assert len(table) == 1
                for position in range(start, end):
                    self.write(group, table[0], position % size, (seq.key, position))
                continue
            for position in range(start, end + num_lookahead):
                content = names[position] if position < min(end, num_known) else self.garbage()
                assert position // size < len(table), f"group {group}: no slot for token {position} of {start}..{end}"
                self.write(group, table[position // size], position % size, content)
        seq.encoder_written = True

    def read(self, seq: Sequence, tables: list[Table], num_new: int, num_known: int) -> None:
        start = seq.num_done
        end = min(start + num_new, num_known)
        names = self.names(seq.tokens[:end])
        for group, spec in enumerate(self.specs):
            size, table = self.block_sizes[group], tables[group]
            if isinstance(spec, (MambaSpec, CrossAttentionSpec, CircularBufferSpec)):
                continue
            for position in range(first_read(spec, start), end):
                block = table[position // size]
                assert block != 0, f"group {group}: token {start} reads {position}, whose block is gone"
                found = self.slots[group].get((block, position % size))
                assert found == names[position], (
                    f"group {group}: token {start} reads {found} at {position} in block {block}, not {names[position]}"
                )

    def recur_read(self, seq: Sequence, tables: list[Table]) -> None:
        """Every state that the step starts from is where the step before (or the hit) left it, and still held."""
        if seq.num_done == 0:
            return
        expected = self.name(seq.tokens, seq.num_done)
        for group, spec in enumerate(self.specs):
            if not isinstance(spec, MambaSpec):
                continue
            table = tables[group]
            block = seq.state_block.get(group, 0) or table[(seq.num_done - 1) // self.block_sizes[group]]
            assert block in set(table) - {0}, f"group {group}: the state after {seq.num_done} tokens is gone"
            found = self.slots[group].get((block, 0))
            assert found == expected, f"group {group}: state after {seq.num_done} tokens in {block}: {found}"

    def recur_write(
        self, seq: Sequence, tables: list[Table], num_new: int, num_known: int, checkpoints: dict[int, tuple[int, int]]
    ) -> None:
        """Leaves states behind. A chunk of known tokens leaves one, and at `checkpoints` (group -> (tokens, table
        entry)) another; a step whose last tokens are drafts, of which those up to num_known are accepted, leaves one
        after each token."""
        start = seq.num_done
        end = start + num_new
        names = [0, *self.names(seq.tokens[:num_known])]
        for group, spec in enumerate(self.specs):
            if not isinstance(spec, MambaSpec):
                continue
            size, table = self.block_sizes[group], tables[group]
            running = len(table) - 1 - spec.num_speculative_blocks
            if group in checkpoints:
                position, entry = checkpoints[group]
                assert start < position < end
                self.write(group, table[entry], 0, names[position])
            if not seq.verifies_drafts:
                self.write(group, table[running], 0, names[end])
                seq.state_block[group] = table[running]
                continue
            for index in range(num_new):
                after = start + 1 + index
                self.write(group, table[running + index], 0, names[after] if after <= num_known else self.garbage())
            seq.state_block[group] = table[running + num_known - start - 1]
            # The worker brings a state that a block's end passed to that block's place in the table.
            boundary = num_known // size * size
            entry = boundary // size - 1
            if start < boundary and entry <= running and table[entry] not in (0, seq.state_block[group]):
                self.write(group, table[entry], 0, names[boundary])
                if entry == running:
                    seq.state_block[group] = table[entry]


def first_read(spec: KVCacheSpec, token: int) -> int:
    """The first token that `token` reads."""
    if isinstance(spec, (SlidingWindowSpec, SlidingWindowMLASpec)):
        return max(0, token - spec.sliding_window + 1)
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return token // spec.attention_chunk_size * spec.attention_chunk_size
    return 0
