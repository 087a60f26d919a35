"""DecodeReturn: update_from_output() of a step whose every request got one token.

First every request and the token that came back for it are looked at; then tokens are appended, ends are seen and what
the clients get is made. Requests that ended in the meantime (aborted while the step ran) are passed over, as in vLLM.
"""

import time
from collections import defaultdict
from typing import Any, Final

from vllm.distributed.kv_events import KVEventBatch
from vllm.v1.core.sched.utils import check_stop, remove_all
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs

from kvledger.integrations.vllm.decoding import Decoding, Decodings


class DecodeReturn:
    """Of one scheduler."""

    def __init__(self, scheduler: Any, decodings: Decodings) -> None:
        self._decodings: Final = decodings
        self._scheduler: Final = scheduler
        self._manager: Final = scheduler.kv_cache_manager
        self._max_model_len: Final[int] = scheduler.max_model_len
        self._hash_block_size: Final[int] = scheduler.hash_block_size

    def take(self, scheduler_output: Any, runner_output: Any) -> Any:
        """EngineCoreOutputs by client; None, with nothing changed, if there is anything else than one token each."""
        if not self._is_plain_step(scheduler_output, runner_output):
            return None
        rows = self._rows(scheduler_output.num_scheduled_tokens, runner_output)
        if rows is None:
            return None
        outputs, stopped = self._append(rows)
        scheduler = self._scheduler
        if stopped:
            scheduler.running = remove_all(scheduler.running, stopped)
        return self._by_client(outputs, runner_output.cudagraph_stats)

    def _is_plain_step(self, scheduler_output: Any, runner_output: Any) -> bool:
        scheduler = self._scheduler
        return not (
            scheduler_output.total_num_scheduled_tokens != len(scheduler_output.num_scheduled_tokens)
            or scheduler_output.scheduled_spec_decode_tokens
            or scheduler.grammar_compile_error_reqs
            or scheduler.encoder_cache_mismatch_reqs
            or not runner_output.sampled_token_ids
            or runner_output.logprobs is not None
            or runner_output.prompt_logprobs_dict
            or runner_output.prompt_token_id_logprobs_dict
            or runner_output.pooler_output
            or runner_output.num_nans_in_logits
            or runner_output.kv_connector_output
            or runner_output.ec_connector_output
        )

    def _rows(self, request_ids: Any, runner_output: Any) -> list[tuple[Decoding, list[int]]] | None:
        """The requests that are still there, each with the list of its token; None if one is no plain decode."""
        requests, decodings_of = self._scheduler.requests, self._decodings.of
        sampled = runner_output.sampled_token_ids
        index_of = runner_output.req_id_to_index
        rows: list[tuple[Decoding, list[int]]] = []
        for request_id in request_ids:
            request = requests.get(request_id)
            if request is None:
                continue
            tokens: list[int] = sampled[index_of[request_id]]
            decoding = decodings_of(request_id, request)
            if (
                decoding is None
                or len(tokens) != 1
                # From before a preemption: those still run, or wait to.
                or request.num_stale_output_tokens
                # Its first token: it comes with the account of its prompt.
                or request.prefill_stats is not None
            ):
                return None
            rows.append((decoding, tokens))
        return rows

    def _append(self, rows: list[tuple[Decoding, list[int]]]) -> tuple[dict[int, list[Any]], set[Any]]:
        """Appends each token; what the clients get, and the requests that ended."""
        hash_block_size, max_model_len = self._hash_block_size, self._max_model_len
        outputs: dict[int, list[Any]] = defaultdict(list)
        stopped: set[Any] = set()
        for decoding, tokens in rows:
            request, all_tokens, token = decoding.request, decoding.tokens, tokens[0]
            request.num_in_flight_tokens -= 1
            decoding.output_tokens.append(token)
            all_tokens.append(token)
            num_tokens = len(all_tokens)
            if num_tokens % hash_block_size == 0:
                request.update_block_hashes()
            is_end = (num_tokens >= decoding.last or token in decoding.stops) and check_stop(request, max_model_len)
            if request.num_output_placeholders > 0:
                request.num_output_placeholders -= 1
                self._cache(request)
            output = EngineCoreOutput(decoding.request_id, tokens)
            if request.events:
                output.events = request.take_events()
            if decoding.trace_headers is not None:
                output.trace_headers = decoding.trace_headers
            if request.num_nans_in_logits:
                output.num_nans_in_logits = request.num_nans_in_logits
            if is_end:
                output.finish_reason = request.get_finished_reason()
                output.stop_reason = request.stop_reason
                self._scheduler._free_request(request)
                self._decodings.forget(decoding.request_id)
                stopped.add(request)
            outputs[decoding.client].append(output)
        return outputs, stopped

    def _cache(self, request: Any) -> None:
        """Scheduled ahead of its token, so that the block that it filled could not be named: it can be now."""
        num_known = request.num_computed_tokens - request.num_output_placeholders
        held = self._manager.ours.get(request.request_id)
        if held is not None and num_known > held.quiet_end:
            self._manager.cache_blocks(request, num_known)

    def _by_client(self, outputs: dict[int, list[Any]], cudagraph_stats: Any) -> dict[int, Any]:
        """The end of vLLM's update_from_output: events, ends and statistics."""
        scheduler = self._scheduler
        events = self._manager.take_events()
        if events:
            scheduler.kv_event_publisher.publish(KVEventBatch(ts=time.time(), events=events))
        by_client = {client: EngineCoreOutputs(outputs=made) for client, made in outputs.items()}
        finished = scheduler.finished_req_ids_dict
        if finished:
            for client, request_ids in finished.items():
                of_client = by_client.get(client)
                if of_client is None:
                    by_client[client] = EngineCoreOutputs(finished_requests=request_ids)
                else:
                    of_client.finished_requests = request_ids
            finished.clear()
        stats = scheduler.make_stats(None, None, cudagraph_stats, None, ec_connector_stats=None)
        if stats is not None:
            if not by_client:
                by_client[0] = EngineCoreOutputs()
            next(iter(by_client.values())).scheduler_stats = stats
        return by_client
