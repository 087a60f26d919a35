"""SGLang's radix cache as its scheduler drives it: the tree in Rust, the pages and the requests' rows in torch, on CPU.

Importing the cache imports half of the engine with it: kernels and image libraries that are built for GPUs, of which
the cache uses nothing. Placeholders stand for those.
"""

import logging
import sys
import warnings
from array import array
from importlib.machinery import ModuleSpec
from importlib.metadata import version as package_version
from types import ModuleType
from typing import Any, Final

import torch

from benchmarks.peers.operation import Operation
from benchmarks.peers.operations import make_operation
from benchmarks.peers.parts import Ledger, Parts
from benchmarks.peers.workload import BLOCK_SIZE, MAX_MODEL_LEN, blocks_for_decoding, decoding_prompts

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


OFFERED: Final = ("decode_step", "admission", "free", "pool_build", "collection", "pool_size", "cached_blocks")


def prepare(case: dict[str, Any]) -> Operation | str:
    question, variant = case["question"], case["variant"]
    if question not in OFFERED:
        return "it has no such thing, or none that runs without a GPU"
    if question == "admission" and (variant == "hash" or case["hash_name"] != "xxh3"):
        return "it hashes nothing, so there is one row for each share of hits"
    if question == "decode_step":
        if variant != "batch" or case["num_groups"] != 1:
            return "it takes all requests in one call, and has one group"
        return DecodeStep(case)
    return make_operation(SglangParts(), case)


class Pages:
    """SGLang's parts: its pages, its table of requests' rows, and its tree."""

    def __init__(self, num_blocks: int, num_rows: int) -> None:
        self.allocator: Final = make_allocator(num_blocks)
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


def make_allocator(num_blocks: int) -> PagedTokenToKVPoolAllocator:
    return PagedTokenToKVPoolAllocator(num_blocks * BLOCK_SIZE, BLOCK_SIZE, torch.float16, "cpu", None, False)


class TreeRequest:
    """`lock`: what holds its pages, once it is admitted."""

    __slots__ = ("lock", "tokens")

    def __init__(self, tokens: "array[int]") -> None:
        self.tokens = tokens
        self.lock: Any = None


class SglangLedger(Ledger[TreeRequest]):
    """What its scheduler does with those parts for one request at a time. Requests use one row in turns: nobody reads
    it when they are admitted.
    """

    ROW: Final = 1

    def __init__(self, num_blocks: int) -> None:
        self._pages: Final = Pages(num_blocks, num_rows=4)
        self.free = self._free

    def request(self, name: str, tokens: list[int]) -> TreeRequest:
        return TreeRequest(array("q", tokens))

    def hashed(self, prompt: list[int]) -> TreeRequest:
        """It compares token ids instead."""
        return TreeRequest(array("q", prompt))

    def admit(self, request: TreeRequest) -> None:
        """Looks up, evicts what is needed, takes pages for the rest, puts the whole into the tree and locks it. As in
        its scheduler, the last token is never a hit.
        """
        tree, allocator, rows = self._pages.tree, self._pages.allocator, self._pages.rows
        tokens, row = request.tokens, self.ROW
        match = tree.match_prefix(MatchPrefixParams(key=RadixKey(tokens, limit=len(tokens) - 1)))
        num_hit = match.device_prefix_len
        lock = tree.lock(match.last_device_node)
        num_new = len(tokens) - num_hit
        num_missing = num_new + BLOCK_SIZE - allocator.available_size()
        if num_missing > 0:
            tree.evict_for_alloc(EvictParams(num_tokens=num_missing))
        if num_hit > 0:
            hit = tree.path_device_indices(match.last_device_node)
            rows.write((row, slice(0, num_hit)), hit[:num_hit])
            last = hit[num_hit - 1 : num_hit]
        else:
            last = torch.tensor([-1])
        before, after = torch.tensor([num_hit]), torch.tensor([len(tokens)])
        taken = allocator.alloc_extend(before, before, after, after, last, num_new)
        if taken is None:
            raise RuntimeError("the benchmark's pool is too small")
        rows.write((row, slice(num_hit, len(tokens))), taken)
        self._insert(tokens, num_hit)
        cached = tree.match_prefix(MatchPrefixParams(key=RadixKey(tokens)))
        request.lock = tree.lock(cached.last_device_node)
        tree.unlock(lock)

    def _free(self, request: TreeRequest) -> None:
        """What it does for a finished request: everything is put into the tree (here it is there) and unlocked."""
        self._insert(request.tokens, len(request.tokens))
        self._pages.tree.unlock(request.lock)

    def _insert(self, tokens: "array[int]", num_owned: int) -> None:
        row = self._pages.rows.req_to_token[self.ROW]
        values = row[: len(tokens)].to(dtype=torch.int64, copy=True)
        self._pages.tree.insert(InsertParams(key=RadixKey(tokens), value=values, prev_prefix_len=num_owned))


class DecodeStep(Operation):
    """Slots for the next token of all requests in one call, and their rows written, as its scheduler does."""

    def __init__(self, case: dict[str, Any]) -> None:
        num_running = case["num_running"]
        decoding = decoding_prompts(num_running)
        self._pages: Final = Pages(blocks_for_decoding(case) + num_running, num_running)
        self._rows: Final = torch.arange(1, num_running + 1)
        self._lengths = torch.tensor([len(prompt) for prompt in decoding])
        num_pages = (self._lengths + BLOCK_SIZE - 1) // BLOCK_SIZE
        for row, pages in enumerate(num_pages.tolist(), 1):
            taken = self._pages.allocator.alloc(pages * BLOCK_SIZE)
            self._pages.rows.write((row, slice(0, pages * BLOCK_SIZE)), taken)

    def before(self) -> None:
        self._lengths = self._lengths + 1

    def run(self) -> None:
        pages, lengths = self._pages, self._lengths
        last = pages.rows.req_to_token[self._rows, lengths - 2].to(torch.int64)
        taken = pages.allocator.alloc_decode(lengths, lengths, last)
        if taken is None:
            raise RuntimeError("the benchmark's pool is too small")
        pages.rows.write((self._rows, lengths - 1), taken.to(torch.int32))


class SglangParts(Parts):
    def ledger(self, num_blocks: int, hash_name: str = "sha256") -> SglangLedger:
        return SglangLedger(num_blocks)

    def pool(self, num_blocks: int) -> PagedTokenToKVPoolAllocator:
        return make_allocator(num_blocks)
