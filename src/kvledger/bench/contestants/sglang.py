"""SGLang's radix cache as its scheduler drives it: the tree in Rust, the pages and the requests' rows in torch, on CPU.

Importing the cache imports half of the engine with it: kernels and image libraries that are built for GPUs, of which
the cache uses nothing. Placeholders stand for those.
"""

import gc
import logging
import sys
import warnings
from array import array
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from importlib.metadata import version as package_version
from types import ModuleType
from typing import Any, Final

import torch

from kvledger.bench.operation import Builder, Operation, num_runs
from kvledger.bench.workload import (
    BLOCK_SIZE,
    MAX_MODEL_LEN,
    POOL_BLOCKS,
    blocks_for_decoding,
    decoding_prompts,
    fillers,
    prompts,
    traffic,
)

ABSENT: Final = ("torchvision", "sgl_kernel")


class _Anything(type):
    """A class of which every attribute is another such class."""

    def __getattr__(cls, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (), {})


class _Placeholder(ModuleType):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (), {})


class _PlaceholderFinder:
    """Finds a placeholder for packages that are absent, and for every module below them."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name.split(".")[0] in ABSENT else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Placeholder(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


logging.disable(logging.WARNING)
warnings.simplefilter("ignore")
# Before the placeholders: transformers looks which packages there are.
import transformers  # noqa: E402

transformers.utils.import_utils.is_torchvision_available()
transformers.AutoProcessor  # noqa: B018
sys.meta_path.append(_PlaceholderFinder())

from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator  # noqa: E402
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams  # noqa: E402
from sglang.srt.mem_cache.cache_init_params import CacheInitParams  # noqa: E402
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool  # noqa: E402
from sglang.srt.mem_cache.radix_cache import RadixKey  # noqa: E402
from sglang.srt.mem_cache.unified_cache.components import ComponentType  # noqa: E402
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache  # noqa: E402


def version() -> str:
    return f"SGLang {package_version('sglang')}"


def prepare(case: dict[str, Any]) -> Operation | str:
    make = _OPERATIONS.get(case["question"])
    if make is None:
        return "it has no such thing, or none that runs without a GPU"
    return make(case)


class Cache:
    """SGLang's parts, and what its scheduler does with them for one request at a time."""

    def __init__(self, num_blocks: int, num_rows: int = 4) -> None:
        self.allocator: Final = PagedTokenToKVPoolAllocator(
            num_blocks * BLOCK_SIZE, BLOCK_SIZE, torch.float16, "cpu", None, False
        )
        # Its kernels are for GPUs; this is its own way without them.
        self.allocator.use_triton_kernels = False
        self.rows: Final = ReqToTokenPool(num_rows, MAX_MODEL_LEN, "cpu", False)
        self.tree: Final = UnifiedRadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=self.rows,
                token_to_kv_pool_allocator=self.allocator,
                page_size=BLOCK_SIZE,
                tree_components=(ComponentType.FULL,),
            )
        )

    def admit(self, tokens: "array[int]", row: int) -> Any:
        """Looks up, evicts what is needed, takes pages for the rest, and puts the whole into the tree. Returns the
        lock that holds it. As in its scheduler, the last token is never a hit.
        """
        tree, allocator = self.tree, self.allocator
        match = tree.match_prefix(MatchPrefixParams(key=RadixKey(tokens, limit=len(tokens) - 1)))
        num_hit = match.device_prefix_len
        lock = tree.lock(match.last_device_node)
        num_new = len(tokens) - num_hit
        num_missing = num_new + BLOCK_SIZE - allocator.available_size()
        if num_missing > 0:
            tree.evict_for_alloc(EvictParams(num_tokens=num_missing))
        slots = self.rows.req_to_token
        if num_hit > 0:
            hit = tree.path_device_indices(match.last_device_node)
            self.rows.write((row, slice(0, num_hit)), hit[:num_hit])
            last = hit[num_hit - 1 : num_hit]
        else:
            last = torch.tensor([-1])
        before, after = torch.tensor([num_hit]), torch.tensor([len(tokens)])
        taken = allocator.alloc_extend(before, before, after, after, last, num_new)
        if taken is None:
            raise RuntimeError("the benchmark's pool is too small")
        self.rows.write((row, slice(num_hit, len(tokens))), taken)
        self._insert(tokens, slots[row], num_hit)
        cached = tree.match_prefix(MatchPrefixParams(key=RadixKey(tokens)))
        new_lock = tree.lock(cached.last_device_node)
        tree.unlock(lock)
        return new_lock

    def free(self, tokens: "array[int]", row: int, lock: Any) -> None:
        """What it does for a finished request: everything is put into the tree (here it is there) and unlocked."""
        self._insert(tokens, self.rows.req_to_token[row], len(tokens))
        self.tree.unlock(lock)

    def _insert(self, tokens: "array[int]", row: torch.Tensor, num_owned: int) -> None:
        values = row[: len(tokens)].to(dtype=torch.int64, copy=True)
        self.tree.insert(InsertParams(key=RadixKey(tokens), value=values, prev_prefix_len=num_owned))

    def fill(self, num_blocks: int) -> None:
        """Leaves so many cached pages that nobody holds."""
        for tokens in fillers(num_blocks):
            packed = array("q", tokens)
            self.tree.unlock(self.admit(packed, 1))


class DecodeStep(Operation):
    """Slots for the next token of all requests in one call, and their rows written, as its scheduler does."""

    def __init__(self, case: dict[str, Any]) -> None:
        num_running = case["num_running"]
        prompts_ = decoding_prompts(num_running)
        self._cache: Final = Cache(blocks_for_decoding(case) + num_running, num_running)
        self._rows: Final = torch.arange(1, num_running + 1)
        self._lengths = torch.tensor([len(prompt) for prompt in prompts_])
        num_pages = (self._lengths + BLOCK_SIZE - 1) // BLOCK_SIZE
        for row, pages in enumerate(num_pages.tolist(), 1):
            self._cache.rows.write((row, slice(0, pages * BLOCK_SIZE)), self._cache.allocator.alloc(pages * BLOCK_SIZE))

    def before(self) -> None:
        self._lengths = self._lengths + 1

    def run(self) -> None:
        cache, lengths = self._cache, self._lengths
        last = cache.rows.req_to_token[self._rows, lengths - 2].to(torch.int64)
        taken = cache.allocator.alloc_decode(lengths, lengths, last)
        if taken is None:
            raise RuntimeError("the benchmark's pool is too small")
        cache.rows.write((self._rows, lengths - 1), taken.to(torch.int32))


def _decode_step(case: dict[str, Any]) -> Operation | str:
    if case["variant"] != "batch" or case["num_groups"] != 1:
        return "it takes all requests in one call, and has one group"
    return DecodeStep(case)


class Admission(Operation):
    def __init__(self, case: dict[str, Any]) -> None:
        self._cache: Final = Cache(POOL_BLOCKS)
        self._cache.fill(POOL_BLOCKS - case["num_tokens"] // BLOCK_SIZE)
        self._traffic: Final = traffic(case["num_tokens"], case["hit_percent"])
        # The first of the traffic leaves the shared part behind, as for the others.
        self._tokens = array("q", next(self._traffic))
        self._lock = self._cache.admit(self._tokens, 1)
        self.after()
        self._prompt: list[int] = []

    def before(self) -> None:
        self._prompt = next(self._traffic)

    def run(self) -> None:
        self._tokens = array("q", self._prompt)
        self._lock = self._cache.admit(self._tokens, 1)

    def after(self) -> None:
        self._cache.free(self._tokens, 1, self._lock)


class Free(Admission):
    def before(self) -> None:
        self._tokens = array("q", next(self._traffic))
        self._lock = self._cache.admit(self._tokens, 1)

    def run(self) -> None:
        self._cache.free(self._tokens, 1, self._lock)

    def after(self) -> None:
        pass


def _admission(case: dict[str, Any]) -> Operation | str:
    if case["variant"] == "hash" or case["hash_name"] != "xxh3":
        return "it hashes nothing, so there is one row for each share of hits"
    return Admission(case)


class PoolBuild(Builder):
    def __init__(self, case: dict[str, Any]) -> None:
        super().__init__()
        self._num_tokens: Final[int] = case["num_blocks"] * BLOCK_SIZE

    def build(self) -> object:
        return PagedTokenToKVPoolAllocator(self._num_tokens, BLOCK_SIZE, torch.float16, "cpu", None, False)


class Collection(Operation):
    def __init__(self, case: dict[str, Any]) -> None:
        num_blocks = case["num_blocks"]
        self._cache: Final = Cache(num_blocks, 4)
        self._locks: Final = [self._cache.admit(array("q", tokens), 1) for tokens in fillers(num_blocks - 2)]
        if case["variant"] == "frozen":
            gc.freeze()

    def run(self) -> None:
        gc.collect()


class AdmitAndFree(Operation):
    def __init__(self, case: dict[str, Any]) -> None:
        num_tokens = case["num_tokens"]
        self._cache: Final = Cache(case["num_blocks"])
        self._cache.fill(min(case["num_cached"], case["num_blocks"] - num_tokens // BLOCK_SIZE))
        all_prompts = prompts(num_runs(case["repeats"]), num_tokens, seed=3)
        self._all_tokens: Final = [array("q", prompt) for prompt in all_prompts]

    def run(self) -> None:
        tokens = self._all_tokens.pop()
        self._cache.free(tokens, 1, self._cache.admit(tokens, 1))


_OPERATIONS: Final[dict[str, Callable[[dict[str, Any]], Operation | str]]] = {
    "decode_step": _decode_step,
    "admission": _admission,
    "free": Free,
    "pool_build": PoolBuild,
    "collection": Collection,
    "pool_size": AdmitAndFree,
    "cached_blocks": AdmitAndFree,
}
