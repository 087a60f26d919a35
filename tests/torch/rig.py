"""A tiny model behind a real scheduler, ledger and worker, suspicious of every step.

rig = Rig("mistral", usable=20, block_size=4, chunk=7)
rig.add("a", prompt(20), 8)           queue a request for 8 tokens
rig.step(); rig.run()                 one step; all steps
rig.tokens("a")                       what it got
rig.expect_reference()                everybody got what transformers' own generate gives

Before each step every block that nobody holds and no hash keeps, and the null block, is filled with bytes that are not
a number in any float type. With `hits=False` nothing is cached, so that is every free block.
"""

from collections.abc import Callable
from typing import Any

import torch

from kvledger import KVCacheConfig, KVCacheManager, Request
from kvledger.core.groups.spec import SlidingWindowSpec
from kvledger.engine.sampling_params import SamplingParams
from kvledger.engine.transformers_model import TransformersModel, kv_cache_layout
from kvledger.engine.worker import TorchWorker
from kvledger.scheduler import Scheduler, SchedulerConfig, SchedulerOutput
from tests.helpers import cached_ids, free_order
from tests.torch.models import continuation, tiny_model

NOT_A_NUMBER = 0xFF
NULL_BLOCK = 0


class Rig:
    def __init__(
        self,
        family: str,
        usable: int = 64,
        block_size: int = 4,
        *,
        chunk: int = 64,
        max_num_seqs: int = 7,
        hits: bool = True,
        hybrid_manager: bool = True,
        zero_new_blocks: bool = False,
        max_model_len: int = 128,
        **options: Any,
    ) -> None:
        self.family = family
        model = tiny_model(family)
        layout = kv_cache_layout(model.config, block_size=block_size, hybrid_manager=hybrid_manager)
        self.config = KVCacheConfig(usable + 1, layout.groups)
        self.manager = KVCacheManager(self.config, max_model_len, enable_caching=hits)
        self.scheduler = Scheduler(
            self.manager,
            SchedulerConfig(max_num_seqs=min(max_num_seqs, chunk), max_num_batched_tokens=chunk, **options),
        )
        self.worker = TorchWorker(
            TransformersModel(model),
            self.config,
            max_num_reqs=max_num_seqs,
            max_model_len=max_model_len,
            zero_new_blocks=zero_new_blocks,
        )
        self.requests: dict[str, Request] = {}
        self.num_poisoned = 0

    def add(self, request_id: str, prompt_ids: list[int], max_tokens: int = 8, **sampling: Any) -> Request:
        request = Request(
            request_id,
            prompt_ids,
            max_tokens=max_tokens,
            sampling_params=SamplingParams(**sampling) if sampling else None,
        )
        self.requests[request_id] = request
        self.scheduler.add_request(request)
        return request

    def fork(self, request_id: str, *child_ids: str) -> None:
        assert self.scheduler.fork(request_id, list(child_ids)), "no room for the fork"
        for child_id in child_ids:
            self.requests[child_id] = self.scheduler.get_request(child_id)

    def step(self) -> SchedulerOutput:
        output = self.schedule()
        self.deliver(output, self.worker.execute(output))
        return output

    def schedule(self) -> SchedulerOutput:
        output = self.scheduler.schedule()
        self.poison()
        return output

    def deliver(self, output: SchedulerOutput, sampled: list[list[int]]) -> None:
        self.scheduler.update_from_output(output, sampled)
        self.scheduler.check()
        self.worker.check()

    def run(self, draft: Callable[[Request], list[int]] | None = None) -> list[SchedulerOutput]:
        """All steps. `draft` guesses what follows the tokens of a request."""
        outputs: list[SchedulerOutput] = []
        while self.scheduler.has_unfinished_requests:
            outputs.append(self.step())
            assert len(outputs) < 1000, "nothing gets done"
            for request in self.scheduler.running_requests() if draft else []:
                assert draft is not None
                self.scheduler.update_draft_tokens(request.request_id, draft(request))
        return outputs

    def poison(self) -> None:
        kept = set(cached_ids(self.manager))
        free = [block_id for block_id in free_order(self.manager) if block_id not in kept]
        self.num_poisoned += len(free)
        self.worker.tensors.fill_blocks([NULL_BLOCK, *free], NOT_A_NUMBER)

    def poison_behind_windows(self) -> None:
        """Also what lies behind a window in blocks that still reach into it."""
        for request in self.scheduler.running_requests():
            for group_id, group in enumerate(self.config.groups):
                spec = group.spec
                if not isinstance(spec, SlidingWindowSpec):
                    continue
                block_ids = self.manager.get_block_ids(request.request_id)[group_id]
                for position in range(max(0, request.num_computed_tokens - spec.sliding_window + 1)):
                    block_id = block_ids[position // spec.block_size]
                    for name in group.layer_names:
                        self.worker.tensors.layers[name].pages[block_id, position % spec.block_size] = float("nan")

    def tokens(self, request_id: str) -> list[int]:
        return self.requests[request_id].output_token_ids()

    def expect_reference(self) -> None:
        for request in self.requests.values():
            assert request.is_finished
            prompt_ids = request.tokens.token_ids(0, request.num_prompt_tokens)
            expected = continuation(self.family, prompt_ids, request.max_tokens)
            assert request.output_token_ids() == expected, request.request_id

    def values(self, request_id: str, layer: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        """What the blocks of a running request hold for a layer: (first token, keys, values) of tokens that are kept
        and computed; [tokens, KV heads, head size]."""
        tensors = self.worker.tensors.layers[f"layers.{layer}.self_attn"]
        spec = tensors.spec
        end = self.requests[request_id].num_computed_tokens
        first = max(0, end - spec.sliding_window + 1) if isinstance(spec, SlidingWindowSpec) else 0
        block_ids = self.manager.get_block_ids(request_id)[tensors.group_id]
        places = [
            (block_ids[position // spec.block_size], position % spec.block_size) for position in range(first, end)
        ]
        return (
            first,
            torch.stack([tensors.keys[place] for place in places]),
            torch.stack([tensors.values[place] for place in places]),
        )
