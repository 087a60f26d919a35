"""TorchWorker: the other side of the scheduler, in torch. It has the model, the KV tensors and the block tables, and
receives nothing but SchedulerOutputs.

    execute(output):  rows and new block ids into the tables -> block copies -> one flat batch of all scheduled tokens
                      -> the model, once -> tokens for every request whose known tokens are through

What it knows of a request it got with NewRequestData or sampled itself, so steps may be scheduled before the tokens of
the step before are back.
"""

from dataclasses import dataclass
from typing import Final

import torch

from kvledger.core.groups.spec import KVCacheConfig
from kvledger.core.scheduler.output import NewRequestData, SchedulerOutput
from kvledger.core.tables.block_tables import BlockTables
from kvledger.core.units import cdiv
from kvledger.engine.kv_tensors import KVTensors
from kvledger.engine.paged_attention import PagedAttention, Span
from kvledger.engine.paged_model import PagedModel
from kvledger.engine.sampler import SampledRows, Sampler
from kvledger.engine.sampling_params import GREEDY, SamplingParams
from kvledger.errors import require, wrong_value

# Stands in for a draft that nobody knows. Its logits are never used, because it is never accepted.
UNKNOWN_DRAFT_TOKEN: Final = 0


class WorkerRequest:
    """A request that runs: its known tokens, and how many of them have keys and values in the cache."""

    def __init__(self, data: NewRequestData) -> None:
        self.request_id: Final = data.request_id
        params = data.sampling_params
        if params is not None and not isinstance(params, SamplingParams):
            problem = f"request {data.request_id!r}: not what a worker can sample by"
            raise wrong_value("sampling_params", params, problem, "give SamplingParams, or None for greedy")
        self.params: Final = params or GREEDY
        self.token_ids: Final = data.token_ids
        self.num_computed_tokens = data.num_computed_tokens


@dataclass(frozen=True)
class BatchPart:
    """One request's part of a step: known tokens, then drafts."""

    request: WorkerRequest
    span: Span
    draft_token_ids: list[int]

    @property
    def num_known(self) -> int:
        """Known tokens that the step computes."""
        return self.span.num_tokens - len(self.draft_token_ids)

    @property
    def yields_tokens(self) -> bool:
        """Whether the step gets to the last known token, so that the next one can be chosen."""
        return self.span.start + self.num_known == len(self.request.token_ids)

    def input_ids(self) -> list[int]:
        known = self.request.token_ids[self.span.start : self.span.start + self.num_known]
        return known + [UNKNOWN_DRAFT_TOKEN if draft < 0 else draft for draft in self.draft_token_ids]

    def sampled_places(self) -> range:
        """Places in the batch whose logits are needed: of the last known token and of every draft."""
        end = self.span.offset + self.span.num_tokens
        return range(end - 1 - len(self.draft_token_ids), end) if self.yields_tokens else range(0)

    def sampled_rows(self) -> SampledRows:
        request = self.request
        return SampledRows(request.request_id, request.params, len(request.token_ids), self.draft_token_ids)


class TorchWorker:
    """Runs steps of one model. `max_num_reqs`: the scheduler's max_num_seqs. One owner thread.

    `zero_new_blocks` clears blocks before their first use. Attention here reads no slot before it is written, so this
    is for kernels that read whole pages and only multiply what they mask by 0.
    """

    def __init__(
        self,
        model: PagedModel,
        config: KVCacheConfig,
        *,
        max_num_reqs: int,
        max_model_len: int,
        sampler: Sampler | None = None,
        zero_new_blocks: bool = False,
    ) -> None:
        self.model: Final = model
        self.tensors: Final = KVTensors(config, model.device)
        self.tables: Final = BlockTables(config.groups, max_num_reqs, max_model_len)
        self.sampler: Final = Sampler() if sampler is None else sampler
        self._zero_new_blocks: Final = zero_new_blocks
        self._requests: Final[dict[str, WorkerRequest]] = {}

    def execute(self, output: SchedulerOutput) -> list[list[int]]:
        """Runs a step, in the order of steps, and returns the new tokens of each request of output.request_ids:
        accepted drafts first, [] while its known tokens are not through. Scheduler.update_from_output wants just that.
        """
        rows = self._apply(output)
        parts = self._parts(output, rows)
        if not parts:
            return []
        with torch.inference_mode():
            logits = self._logits(parts)
            sampling = [part for part in parts if part.yields_tokens]
            sampled = iter(self.sampler.sample(logits, [part.sampled_rows() for part in sampling]))
        return [self._take(part, next(sampled) if part.yields_tokens else []) for part in parts]

    def _apply(self, output: SchedulerOutput) -> list[int]:
        """Brings tables, requests and blocks up to the step. Returns the row of each of its requests."""
        arrived = [WorkerRequest(data) for data in output.new_requests]
        rows = self.tables.apply(output)
        for request_id in output.preempted_request_ids + output.finished_request_ids:
            self._requests.pop(request_id, None)
        for request in arrived:
            self._requests[request.request_id] = request
        if self._zero_new_blocks:
            self.tensors.fill_blocks(self._new_block_ids(output))
        self.tensors.copy_blocks(output.block_copies)
        return rows

    def _new_block_ids(self, output: SchedulerOutput) -> list[int]:
        """Blocks of the step that hold nothing yet: those behind the computed tokens, which hits and copies are for."""
        new_ids: list[int] = []
        for data in output.new_requests:
            for table, block_ids in zip(self.tables.tables, data.block_ids, strict=True):
                new_ids += block_ids[cdiv(data.num_computed_tokens, table.block_size) :]
        return new_ids + [int(block_id) for block_id in output.new_blocks.block_ids]

    def _parts(self, output: SchedulerOutput, rows: list[int]) -> list[BatchPart]:
        parts: list[BatchPart] = []
        offset = 0
        for index, request_id in enumerate(output.request_ids):
            request = self._requests[request_id]
            num_tokens = int(output.num_scheduled_tokens[index])
            drafts = output.draft_token_ids.get(request_id, [])
            parts.append(BatchPart(request, Span(rows[index], offset, request.num_computed_tokens, num_tokens), drafts))
            offset += num_tokens
        return parts

    def _logits(self, parts: list[BatchPart]) -> torch.Tensor:
        token_ids: list[int] = []
        positions: list[int] = []
        wanted: list[int] = []
        for part in parts:
            token_ids += part.input_ids()
            positions += range(part.span.start, part.span.end)
            wanted += part.sampled_places()
        attention = PagedAttention(self.tensors, self.tables.tables, [part.span for part in parts])
        token_tensor, position_tensor, wanted_tensor = (
            torch.tensor(values, dtype=torch.int64, device=self.model.device)
            for values in (token_ids, positions, wanted)
        )
        return self.model.logits(token_tensor, position_tensor, wanted_tensor, attention)

    def _take(self, part: BatchPart, sampled: list[int]) -> list[int]:
        """Counts a request's step as done. Rejected drafts are computed again with the right tokens: their slots will
        be overwritten."""
        request = part.request
        num_accepted = max(0, len(sampled) - 1)
        request.num_computed_tokens += part.num_known + num_accepted
        request.token_ids.extend(sampled)
        return sampled

    def check(self) -> None:
        """Proves that requests and rows are the same, and that nobody counts tokens as computed that are not known."""
        self.tables.check()
        self.tensors.check()
        require(self._requests.keys() == set(self.tables.request_ids()), "a request has no row, or a row no request")
        for request in self._requests.values():
            num_known = len(request.token_ids)
            require(
                0 <= request.num_computed_tokens <= num_known,
                f"{request.request_id!r} has {num_known} tokens and {request.num_computed_tokens} computed ones",
            )
