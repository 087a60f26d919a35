"""Does an operation cost more in a larger pool? A request of 512 tokens, hashes known: admitted and freed.

Every block of the pool is cached, so each one taken evicts another; a larger pool only misses the CPU's caches more.
"""

from benchmarks.measure import Row, Side, compare
from benchmarks.subjects import our_admit, our_manager, prompts, their_admit, their_factory, their_manager
from kvledger import Request

QUESTION = "admit and free 512 tokens, by pool"
NUM_TOKENS = 512
FILLER_TOKENS = 65_000


class Ours(Side):
    def __init__(self, num_blocks: int) -> None:
        self.manager = our_manager(num_blocks)
        hasher = self.manager._hasher
        for index in range(num_blocks * 16 // FILLER_TOKENS + 1):
            filler = Request(f"filler{index}", _filler(index))
            our_admit(self.manager, filler)
            self.manager.free(filler)
        self.requests = [Request(f"r{i}", p) for i, p in enumerate(prompts(300, NUM_TOKENS, seed=3))]
        for request in self.requests:
            hasher.extend(request)

    def run(self) -> None:
        request = self.requests.pop()
        our_admit(self.manager, request)
        self.manager.free(request)


class Theirs(Side):
    def __init__(self, num_blocks: int) -> None:
        self.manager = their_manager(num_blocks)
        # The filler's hash does not matter to the question; the fast one saves minutes.
        fillers = their_factory("xxh3")
        for index in range(num_blocks * 16 // FILLER_TOKENS + 1):
            filler = fillers.make(f"filler{index}", _filler(index))
            their_admit(self.manager, filler)
            self.manager.free(filler)
        factory = their_factory()
        self.requests = [factory.make(f"r{i}", p) for i, p in enumerate(prompts(300, NUM_TOKENS, seed=3))]

    def run(self) -> None:
        request = self.requests.pop()
        their_admit(self.manager, request)
        self.manager.free(request)


def _filler(index: int) -> list[int]:
    """Differs from all others in its first token, and so in every hash of its chain."""
    return [index, *range(FILLER_TOKENS - 1)]


def run(quick: bool) -> list[Row]:
    rows: list[Row] = []
    for num_blocks, name in ((10_000, "10k blocks"), (100_000, "100k blocks"), (1_000_000, "1M blocks")):
        if not (quick and num_blocks > 10_000):
            rows.append(compare(QUESTION, name, Ours(num_blocks), Theirs(num_blocks), 3 if quick else 200))
    return rows
