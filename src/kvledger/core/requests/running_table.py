"""RunningTable: the counters of requests that decode, as native arrays with one row a request.

A step of such a request only counts: one more token computed, one token back. So a scheduler has its row count, and the
request reads its own counters from there (Request.try_enter). What a row needs no array for follows from the others:

    computed          tokens computed, steps in flight included; every row is in every step in flight, with one token
    num_in_flight     steps in flight, of all rows alike
    tokens known      computed + 1 - num_in_flight; those behind what the request has itself stand in `open_tokens`

An event is whatever needs more than counting: a block that fills or is missing, the last token before a limit, open
tokens that have no more room. A row whose computed count is below event_at has none in the next step.
"""

from typing import Final

from librt.vecs import append, vec
from mypy_extensions import i32, i64

# Open tokens of a row, at the token's position modulo this.
NUM_OPEN: Final = 16
# What stands for the stop token where there are several, and where there is none.
SEVERAL_STOPS: Final = -2
NO_STOP: Final = -1


class RunningTable:
    """`are_awaited`: steps overlap, so that tokens in flight are counted before they come."""

    def __init__(self, are_awaited: bool) -> None:
        self.are_awaited: Final = are_awaited
        self.num_in_flight: i64 = 0
        self.computed: vec[i32] = vec[i32]()
        # 0: the request counts for itself.
        self.event_at: vec[i32] = vec[i32]()
        self.stop_token_ids: vec[i32] = vec[i32]()
        self.open_tokens: vec[i32] = vec[i32]()

    def add_row(self) -> None:
        """One more row, at the end. Rows are never taken away: what stands behind the last request means nothing."""
        self.computed = append(self.computed, i32(0))
        self.event_at = append(self.event_at, i32(0))
        self.stop_token_ids = append(self.stop_token_ids, i32(NO_STOP))
        index: i64 = 0
        while index < NUM_OPEN:
            self.open_tokens = append(self.open_tokens, i32(0))
            index += 1

    def move_row(self, source: i64, target: i64) -> None:
        """Row `target` becomes what row `source` is."""
        self.computed[target] = self.computed[source]
        self.event_at[target] = self.event_at[source]
        self.stop_token_ids[target] = self.stop_token_ids[source]
        tokens = self.open_tokens
        base, target_base = source * NUM_OPEN, target * NUM_OPEN
        index: i64 = 0
        while index < NUM_OPEN:
            tokens[target_base + index] = tokens[base + index]
            index += 1

    def quiet_until(self, start: i64, end: i64) -> i64:
        """The first row from `start` on, and before `end`, that has an event in the next step; `end` if none has."""
        computed, event_at = self.computed, self.event_at
        while start < end and computed[start] < event_at[start]:
            start += 1
        return start

    def put_run(self, row: i64, starts: vec[i32], token_ids: list[int]) -> i64:
        """put() for each row from that one on, of a step whose rows are the table's and began at `starts`, with one
        token a row. Returns the first row for which it is False; the number of tokens if there is none. One loop
        without a call, because it is most of a step's way back."""
        event_at, stops, tokens = self.event_at, self.stop_token_ids, self.open_tokens
        num_rows: i64 = len(token_ids)
        while row < num_rows:
            token_id: i64 = token_ids[row]
            stop = i64(stops[row])
            if event_at[row] == 0 or not 0 <= token_id < 1 << 31 or token_id == stop or stop == SEVERAL_STOPS:
                break
            tokens[row * NUM_OPEN + ((i64(starts[row]) + 1) & (NUM_OPEN - 1))] = i32(token_id)
            row += 1
        return row

    def put(self, row: i64, position: i64, token_id: i64) -> bool:
        """Notes the token that the oldest step in flight brings a row, at that position. False, changing nothing, where
        more than noting is due: the request counts for itself, it may stop here, or this is no token id of 31 bits."""
        if self.event_at[row] == 0 or not 0 <= token_id < 1 << 31:
            return False
        stop = self.stop_token_ids[row]
        if token_id == i64(stop) or stop == SEVERAL_STOPS:
            return False
        self.open_tokens[row * NUM_OPEN + (position & (NUM_OPEN - 1))] = i32(token_id)
        return True
