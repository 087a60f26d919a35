"""What a contestant brings: its ledger, its scheduler and its table, behind the few calls that operations.py makes.

Calls that are timed one by one are the contestant's own functions in an attribute, so that nothing stands between.
"""

from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from benchmarks.peers.workload import fillers

RequestT = TypeVar("RequestT")


class Ledger(Generic[RequestT]):
    """A prefix cache over a pool of blocks.

    `free(request)`: it is finished, and its full blocks stay cached. `reset()`: nothing is cached any more.
    """

    free: Callable[[RequestT], object]
    reset: Callable[[], object]

    def request(self, name: str, tokens: list[int]) -> RequestT:
        """With its hashes known, where the contestant hashes."""
        raise NotImplementedError

    def admit(self, request: RequestT) -> None:
        """Looks its prompt up, and allocates and caches it."""
        raise NotImplementedError

    def unhashed(self, tokens: list[int]) -> Any:
        """A prompt as far as the contestant prepares it before it hashes."""
        return tokens

    def hashed(self, prompt: Any) -> RequestT:
        """A request made of what unhashed() gave, hashed."""
        raise NotImplementedError

    def arrive(self, prompt: Any) -> RequestT:
        """What unhashed() gave, hashed and admitted."""
        request = self.hashed(prompt)
        self.admit(request)
        return request

    def filler(self, name: str, tokens: list[int]) -> RequestT:
        """A request that is only there to fill the pool."""
        return self.request(name, tokens)

    def fill(self, num_blocks: int) -> None:
        """Leaves so many cached blocks that nobody holds."""
        for index, tokens in enumerate(fillers(num_blocks)):
            filler = self.filler(f"filler{index}", tokens)
            self.admit(filler)
            self.free(filler)


class DecodingRequest(Protocol):
    num_computed_tokens: int


Decoding = TypeVar("Decoding", bound=DecodingRequest)


class DecodingLedger(Ledger[Decoding]):
    """One that is asked for the next token of each request.

    `allocate(request, num_tokens)`: blocks for so many tokens more. `append(request, token_id)`: a token was sampled.
    """

    allocate: Callable[[Decoding, int], object]
    append: Callable[[Decoding, int], object]

    def allocate_all(self, requests: list[Decoding]) -> None:
        """Blocks for a token more of each, in one call where there is one."""
        allocate = self.allocate
        for request in requests:
            allocate(request, 1)


class Serving:
    """A scheduler with a ledger of its own."""

    def add(self, name: str, prompt: list[int], max_tokens: int) -> None:
        raise NotImplementedError

    def num_running(self) -> int:
        raise NotImplementedError

    def is_busy(self) -> bool:
        """Whether a request is unfinished."""
        raise NotImplementedError

    def sampled(self) -> Any:
        """A token for every request, as decode() wants them from the workers."""
        raise NotImplementedError

    def decode(self, sampled: Any) -> None:
        """A step that gives every request a token: schedule, and the tokens on their way back."""
        raise NotImplementedError

    def advance(self) -> None:
        """A step, with a token for those whose prompt is computed."""
        raise NotImplementedError


class Table:
    """A worker's block table of TABLE_ROWS rows and TABLE_COLUMNS columns."""

    def write_rows(self, rows: list[list[int]]) -> None:
        """The first rows, written anew."""
        raise NotImplementedError

    def clear_row(self, row: int) -> None:
        raise NotImplementedError

    def grow_rows(self) -> None:
        """Appends a block to every row."""
        raise NotImplementedError

    def slots_of(self, rows: list[int], starts: list[int], num_tokens: list[int]) -> Callable[[], object]:
        """A function that computes the slots of that batch."""
        raise NotImplementedError


class Parts:
    """The parts of one contestant. It leaves out those that no case asks it for."""

    def ledger(self, num_blocks: int, hash_name: str = "sha256") -> Ledger[Any]:
        raise NotImplementedError

    def decoding_ledger(self, num_blocks: int, num_groups: int) -> DecodingLedger[Any]:
        raise NotImplementedError

    def pool(self, num_blocks: int) -> object:
        """Its blocks alone."""
        raise NotImplementedError

    def serving(
        self, num_blocks: int, max_num_seqs: int, token_budget: int, num_groups: int = 1, variant: str = ""
    ) -> Serving:
        """`variant`: "results", where decode() makes a result for each request; "overlap", where it schedules a step
        and brings back the one before."""
        raise NotImplementedError

    def table(self) -> Table:
        raise NotImplementedError
