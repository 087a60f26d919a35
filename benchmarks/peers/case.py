"""What is measured: every question with its cases, the same for all contestants."""

from dataclasses import asdict, dataclass
from typing import Any, Final

from benchmarks.peers.workload import BLOCK_SIZE

_K: Final = 1000
_M: Final = 1_000_000
_POOLS: Final = ((10 * _K, "10k blocks"), (100 * _K, "100k blocks"), (_M, "1M blocks"))
# Variants that replay a recorded trace as a whole.
WHOLE: Final = "whole"
WHOLE_BY_BLOCKS: Final = "whole by blocks"
WHOLE_IN_SEQUENCE: Final = "whole in sequence"
WHOLE_REPLAYS: Final = (WHOLE, WHOLE_BY_BLOCKS, WHOLE_IN_SEQUENCE)
_PROMPTS: Final = ((512, "512 tokens"), (32_768, "32k tokens"))


@dataclass(frozen=True)
class Case:
    """One line of the table. Contestants get it as a dict; they read of it what the question needs.

    `per`: operations in a run; values are per operation. `unit` of the values as reported, after `per`: "us" or "B".
    `trace`: a file with prompts (see workload.write_prompts) or a recorded trace, put in place before the run.
    `decides_as`: the release of vLLM whose decisions ours makes, put in place before the run.
    """

    question: str
    size: str
    repeats: int
    unit: str = "us"
    per: int = 1
    num_running: int = 0
    num_groups: int = 1
    num_tokens: int = 0
    hit_percent: int = 0
    hash_name: str = "sha256"
    num_blocks: int = 0
    num_cached: int = 0
    num_requests: int = 0
    variant: str = ""
    trace: str = ""
    decides_as: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Question:
    """`asks`: in words, as --help and the guide have it."""

    name: str
    asks: str
    cases: tuple[Case, ...]


def _decoding(name: str, num_running: int, num_groups: int, variant: str, suffix: str) -> Case:
    return Case(
        name,
        f"{num_running} running, {num_groups} group{'s' * (num_groups > 1)}{suffix}",
        BLOCK_SIZE * (8 if num_running < 1024 else 4),
        per=1 if name == "scheduler_step" else num_running,
        num_running=num_running,
        num_groups=num_groups,
        variant=variant,
    )


def _scheduler_step() -> Question:
    name = "scheduler_step"
    cases: list[Case] = []
    for num_groups in (1, 6):
        cases += [_decoding(name, num_running, num_groups, "", "") for num_running in (256, 1024, 4096)]
        cases.append(_decoding(name, 1024, num_groups, "cold", ", cold caches"))
        cases.append(_decoding(name, 1024, num_groups, "results", ", a result a request"))
        cases.append(_decoding(name, 1024, num_groups, "overlap", ", two steps in flight"))
        # Ours; vLLM has none, and keeps its sha256.
        cases.append(_decoding(name, 1024, num_groups, "siphash", ", siphash"))
    return Question(name, "a whole decode step: schedule(), and the sampled tokens on their way back", tuple(cases))


def _decode_step() -> Question:
    name = "decode_step"
    cases = [
        _decoding(name, num_running, num_groups, variant, suffix)
        for variant, suffix in (("calls", ""), ("append", ", with append"), ("batch", ", in one call"))
        for num_groups in (1, 6)
        for num_running in (256, 1024, 4096)
    ]
    asks = "blocks for the next token of a running request, asked for by interpreted Python"
    return Question(name, asks, tuple(cases))


def _admission() -> Question:
    name = "admission"
    cases = [
        Case(
            name,
            f"{tokens}, {hit}% hit, {hash_name}",
            160 if num_tokens == 512 else 40,
            num_tokens=num_tokens,
            hit_percent=hit,
            hash_name=hash_name,
        )
        for num_tokens, tokens in _PROMPTS
        for hash_name in ("sha256", "xxh3")
        for hit in (0, 50, 100)
    ]
    cases += [
        Case(
            name,
            f"{tokens}, hashing alone, {hash_name}",
            160 if num_tokens == 512 else 40,
            num_tokens=num_tokens,
            hash_name=hash_name,
            variant="hash",
        )
        for num_tokens, tokens in _PROMPTS
        for hash_name in ("sha256", "xxh3")
    ]
    return Question(name, "a prompt hashed, looked up and allocated in a pool full of cached blocks", tuple(cases))


def _free() -> Question:
    cases = [
        Case("free", tokens, 160 if num_tokens == 512 else 40, num_tokens=num_tokens) for num_tokens, tokens in _PROMPTS
    ]
    return Question("free", "a request freed, all of its full blocks cached", tuple(cases))


def _pool_build() -> Question:
    cases = [
        Case("pool_build", blocks, 3 if num_blocks == _M else 9, num_blocks=num_blocks) for num_blocks, blocks in _POOLS
    ]
    return Question("pool_build", "an empty pool built", tuple(cases))


def _memory() -> Question:
    # A million cached blocks tell the same of each, after minutes: every allocation is noted.
    wanted = ((100 * _K, "100k blocks", "empty"), (100 * _K, "100k blocks", "cached"), (_M, "1M blocks", "empty"))
    cases = [
        Case("memory", f"{blocks}, {state}", 1, "B", num_blocks, num_blocks=num_blocks, variant=state)
        for num_blocks, blocks, state in wanted
    ]
    return Question("memory", "Python's memory per block", tuple(cases))


def _collection() -> Question:
    cases = [
        Case("collection", f"{blocks} in use{suffix}", 3, num_blocks=num_blocks, variant=variant)
        for num_blocks, blocks in _POOLS
        for variant, suffix in (("plain", ""), ("frozen", ", after gc.freeze()"))
    ]
    return Question("collection", "a full garbage collection while requests hold every block", tuple(cases))


def _pool_size() -> Question:
    cases = [
        Case("pool_size", blocks, 160, num_tokens=512, num_blocks=num_blocks, num_cached=num_blocks)
        for num_blocks, blocks in _POOLS
    ]
    return Question("pool_size", "512 tokens admitted and freed, hashes known, in pools of several sizes", tuple(cases))


def _cached_blocks() -> Question:
    cases = [
        Case("cached_blocks", f"{cached} of 1M", 160, num_tokens=512, num_blocks=_M, num_cached=num_cached)
        for num_cached, cached in ((0, "none"), *_POOLS)
    ]
    return Question("cached_blocks", "the same in one pool with more and more cached blocks", tuple(cases))


def _reset() -> Question:
    cases = [
        Case("reset", f"{blocks}, all cached", 2 if num_blocks == _M else 5, per=num_blocks, num_blocks=num_blocks)
        for num_blocks, blocks in _POOLS
    ]
    return Question("reset", "reset_prefix_cache, a block", tuple(cases))


def _block_table() -> Question:
    name = "block_table"
    cases = (
        Case(name, "a new row of 32 ids", 96, per=16, variant="new", num_tokens=32),
        Case(name, "a new row of 512 ids", 96, per=16, variant="new", num_tokens=512),
        Case(name, "a row grows by 1 id", 96, per=256, variant="grow"),
        Case(name, "slots of 256 decodes", 96, variant="slots", num_running=256, num_tokens=1),
        Case(name, "slots of 16 prefills of 512 tokens", 96, variant="slots", num_running=16, num_tokens=512),
    )
    return Question(name, "a worker's block table and the slots of a batch", cases)


def _replay() -> Question:
    name = "replay"
    cases = (
        Case(name, "one after another, a request", 8, per=120, num_requests=120, variant="in_turn"),
        Case(name, "scheduled, a request", 8, per=24, num_requests=24, variant="scheduled"),
        _whole(name, "whole sample trace, a request", WHOLE),
        _whole(name, "the same, block by block", WHOLE_BY_BLOCKS),
        _whole(name, "whole sample trace in sequence, a request", WHOLE_IN_SEQUENCE),
    )
    return Question(name, "recorded traffic through the ledger, and through scheduler and ledger", cases)


def _whole(name: str, size: str, variant: str) -> Case:
    return Case(name, size, 3, per=1500, num_requests=1500, variant=variant)


QUESTIONS: Final[dict[str, Question]] = {
    question.name: question
    for question in (
        _scheduler_step(),
        _decode_step(),
        _admission(),
        _free(),
        _pool_build(),
        _memory(),
        _collection(),
        _pool_size(),
        _cached_blocks(),
        _reset(),
        _block_table(),
        _replay(),
    )
}
