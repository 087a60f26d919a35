"""Records leave the process: what the library hands out by value can be pickled, copied, compared and read.

The examples are looked up by the exported names, so a new name is either an example here or says that it is live.
"""

import ast
import copy
import dataclasses
import inspect
import pickle
from collections.abc import Callable
from enum import Enum
from importlib import import_module
from typing import Any

import pytest

import kvledger
import kvledger.engine
import kvledger.errors
import kvledger.events
import kvledger.scheduler
from kvledger import (
    Adapter,
    AdmissionRule,
    BlockCopy,
    BlockShortage,
    BlockStay,
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    CrossAttentionSpec,
    DraftRule,
    FullAttentionSpec,
    GroupOccupancy,
    HostResidentSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MissConfig,
    MissExplainer,
    MLAAttentionSpec,
    MultiModalItem,
    NewBlocks,
    Request,
    RunningSlots,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)
from kvledger.core.blocks.block import make_blocks
from kvledger.core.record import Record
from kvledger.engine import NewTokens, SamplingParams
from kvledger.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch, ViewedBlock, ZmqOptions
from kvledger.scheduler import (
    ExternalHit,
    RequestAccount,
    RequestOutput,
    Scheduler,
    SchedulerConfig,
    SchedulerOutput,
    StallDetector,
)
from tests.engine import Engine
from tests.helpers import admit, admitted, decode, ids, leave, ledger, request
from tests.unit.test_architecture import core_sources

# These work on one ledger, in one process, or are the base of such classes.
LIVE = {
    *("BlockHasher", "BlockPool", "BlockResidency", "ChainedBlockHasher", "FreeKVCacheBlockQueue", "GivenBlockHasher"),
    *("HitCurve", "KVCacheManager", "LedgerObserver", "LedgerObservers", "ManagerRegistry", "MissExplainer"),
    *("Sha256BlockHasher", "SipHashBlockHasher", "VerifiedBlockHasher"),
    *("ExternalKVSource", "RequestAccounting", "Scheduler", "StallDetector"),
    *("Drafter", "Engine", "EngineStats", "Worker"),
    *(
        "CacheView",
        "EventBuilder",
        "EventSink",
        "EventSubscriber",
        "FileSink",
        "LedgerEvents",
        "NullSink",
        "SaltNames",
        "ZmqSink",
    ),
}
# These belong to a ledger and say so when they are copied; a request has no value of its own to compare.
KEPT_BACK = {"KVCacheBlock", "KVCacheBlocks", "PrefixHit"}
BY_IDENTITY = {"Request"}
ABSTRACT = {"KVCacheSpec"}


def full_group() -> KVCacheGroupSpec:
    return KVCacheGroupSpec(("layer.0", "layer.1"), FullAttentionSpec(4, 8, 128), is_draft=True)


def new_blocks() -> NewBlocks:
    blocks = make_blocks(9)
    grown = NewBlocks()
    grown.add(0, 1, blocks[6:], 2)
    grown.add(3, 0, blocks[2:8], 5)
    return grown


class Run:
    """A scheduler with everything on: "a" ends, "b" is preempted, "c" waits for it."""

    def __init__(self) -> None:
        self.bills: list[RequestAccount] = []
        self.manager = ledger(5)
        self.misses = MissExplainer(self.manager)
        self.accounting = kvledger.scheduler.RequestAccounting(self.manager, on_finish=self.bills.append)
        self.scheduler = Scheduler(self.manager, SchedulerConfig(max_num_seqs=2), accounting=self.accounting)
        for name in "abc":
            self.scheduler.add_request(request(name, 7, max_tokens=4, sampling_params=SamplingParams(seed=7)))
        self.first = self.scheduler.schedule()
        self.waiting = self.scheduler.explain("c")
        self.end = self.scheduler.update_from_tokens(self.first, [9, 9])
        self.last = self.first
        while not self.bills:
            self.last = self.scheduler.schedule()
            self.end = self.scheduler.update_from_tokens(self.last, [9] * len(self.last.request_ids))


def output_with_everything() -> SchedulerOutput:
    output = Run().first
    output.new_blocks = new_blocks()
    output.draft_token_ids["a"] = [5, -1]
    output.block_copies.append(BlockCopy(0, 3, 4))
    output.errors["huge"] = kvledger.errors.RequestTooLargeError("needs 9 blocks, the pool has 5")
    return output


EXAMPLES: dict[str, Callable[[], object]] = {
    "Adapter": lambda: Adapter("sql", 3, generation=2),
    "AdmissionRule": lambda: AdmissionRule(reserved_blocks=4),
    "BlockCopy": lambda: BlockCopy(1, 3, 4),
    "BlockShortage": lambda: BlockShortage("a", 4, 3, num_watermark=1, is_whole_sequence=True),
    "BlockStay": lambda: BlockStay(2.5, 1.0, [0.5, 1.0]),
    "ChunkedLocalAttentionSpec": lambda: ChunkedLocalAttentionSpec(16, 8, 128, attention_chunk_size=64),
    "CircularBufferSpec": lambda: CircularBufferSpec(16, 8, 128),
    "CrossAttentionSpec": lambda: CrossAttentionSpec(16, 8, 128, max_encoder_tokens=1500),
    "DraftRule": lambda: DraftRule(3),
    "FullAttentionSpec": lambda: FullAttentionSpec(16, 8, 128, dtype="float32"),
    "GroupOccupancy": lambda: GroupOccupancy(3, 1, 2),
    "HostResidentSpec": lambda: HostResidentSpec(16, 8, 128, num_host_blocks=9),
    "KVCacheConfig": lambda: KVCacheConfig(10, (full_group(),)),
    "KVCacheGroupSpec": full_group,
    "MambaSpec": lambda: MambaSpec(16, ((4, 8), (3,)), ("float32", "bfloat16"), mamba_cache_mode="align"),
    "MissConfig": lambda: MissConfig(max_accounts=7),
    "MissTotals": lambda: Run().misses.new,
    "MLAAttentionSpec": lambda: MLAAttentionSpec(64, 576, alignment=512),
    "MultiModalItem": lambda: MultiModalItem("9af3", 4, 20),
    "NewBlocks": new_blocks,
    "PoolOccupancy": lambda: admitted_ledger().occupancy(),
    "PrefixCacheStats": lambda: admitted_ledger().prefix_cache_totals(),
    "PromptAccount": lambda: Run().misses.recent()[-1],
    "PromptSplit": lambda: Run().misses.recent()[-1].split,
    "RunningSlots": lambda: RunningSlots(4, new_blocks()),
    "SinkFullAttentionSpec": lambda: SinkFullAttentionSpec(16, 8, 128, sink_len=16),
    "SlidingWindowMLASpec": lambda: SlidingWindowMLASpec(64, 576, sliding_window=512),
    "SlidingWindowSpec": lambda: SlidingWindowSpec(16, 8, 128, sliding_window=512),
    "ExternalHit": lambda: ExternalHit(16, asynchronous=True),
    "NewRequestData": lambda: Run().first.new_requests[0],
    "AccountTotals": lambda: Run().accounting.totals(),
    "RequestAccount": lambda: Run().bills[0],
    "RequestOutput": lambda: RequestOutput("a", [4, 5], kvledger.RequestStatus.FINISHED_LENGTH),
    "SchedulerConfig": lambda: SchedulerConfig(max_num_seqs=3),
    "SchedulerOutput": output_with_everything,
    "StallReport": lambda: StallDetector(Run().scheduler, 5).report(),
    "StepEnd": lambda: Run().end,
    "WaitExplanation": lambda: Run().waiting,
    "NewTokens": lambda: NewTokens("a", [1, 2], kvledger.RequestStatus.FINISHED_STOPPED),
    "SamplingParams": lambda: SamplingParams(0.7, top_k=4, seed=3),
    "AllBlocksCleared": AllBlocksCleared,
    "BlockRemoved": lambda: BlockRemoved([b"1", b"2"], "GPU"),
    "BlockStored": lambda: BlockStored([b"1"], None, [1, 2, 3, 4], 4, None, "GPU", None),
    "KVEventBatch": lambda: KVEventBatch(0.5, [BlockRemoved([b"1"], "GPU")]),
    "ViewedBlock": lambda: ViewedBlock(*[0] * len(dataclasses.fields(ViewedBlock))),
    "ZmqOptions": ZmqOptions,
}


def admitted_ledger() -> kvledger.KVCacheManager:
    manager = ledger(8)
    admitted(manager, "a", 10)
    return manager


def exported() -> dict[str, type]:
    """Every class that the documented modules export."""
    modules = (kvledger, kvledger.scheduler, kvledger.engine, kvledger.events)
    names = {name: getattr(module, name) for module in modules for name in module.__all__}
    return {name: value for name, value in names.items() if inspect.isclass(value)}


def is_record(name: str, cls: type) -> bool:
    return not issubclass(cls, Enum | Exception) and name not in LIVE | KEPT_BACK | BY_IDENTITY | ABSTRACT


RECORDS = sorted(name for name, cls in exported().items() if is_record(name, cls))
COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    **{f"pickle {protocol}": lambda value, p=protocol: pickle.loads(pickle.dumps(value, p)) for protocol in (2, 4, 5)},
}


def subclasses(cls: type) -> set[type]:
    return {below for sub in cls.__subclasses__() for below in {sub} | subclasses(sub)}


def test_every_exported_class_has_an_example_or_is_known_to_be_live() -> None:
    assert set(RECORDS) == set(EXAMPLES)
    assert exported().keys() >= LIVE | KEPT_BACK | BY_IDENTITY | ABSTRACT


def test_every_record_of_the_core_is_exported() -> None:
    ours = {cls.__name__ for cls in subclasses(Record) if cls.__module__.startswith("kvledger.core")}
    assert ours - exported().keys() == {"AttentionSpec"}


def test_what_never_changes_is_an_argument_of_the_constructor() -> None:
    """Compiled, nobody can set a Final attribute of a copy; interpreted one can, so the sources are asked."""
    for module, path in core_sources().items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and {ast.unparse(base) for base in node.bases} == {"Record"}:
                cls = getattr(import_module(f"kvledger.{module}"), node.name)
                finals = {
                    attribute.target.attr
                    for attribute in ast.walk(node)
                    if isinstance(attribute, ast.AnnAssign)
                    and isinstance(attribute.target, ast.Attribute)
                    and ast.unparse(attribute.annotation).startswith("Final")
                }
                makes_itself = any(
                    isinstance(part, ast.FunctionDef) and part.name == "__reduce__" for part in node.body
                )
                assert makes_itself or finals <= set(cls.__match_args__), node.name


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("name", RECORDS)
def test_a_copy_is_of_the_same_class_and_equal(name: str, way: str) -> None:
    record = EXAMPLES[name]()
    twin = COPIES[way](record)
    assert type(twin) is type(record) is exported()[name]
    assert twin == record
    assert (twin != record) is False
    assert repr(twin) == repr(record)


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_shows_its_name_and_is_not_equal_to_others(name: str) -> None:
    record = EXAMPLES[name]()
    assert name in repr(record)
    assert " object at 0x" not in repr(record)
    assert record != EXAMPLES["Adapter" if name != "Adapter" else "BlockCopy"]()
    assert record != "text"


@pytest.mark.parametrize("name", [name for name in RECORDS if dataclasses.is_dataclass(exported()[name])])
def test_dataclasses_replace_and_asdict(name: str) -> None:
    record: Any = EXAMPLES[name]()
    assert dataclasses.replace(record) == record
    assert set(dataclasses.asdict(record)) == {field.name for field in dataclasses.fields(record)}


def test_equal_records_that_never_change_are_one_key() -> None:
    for name in ("Adapter", "AdmissionRule", "BlockCopy", "FullAttentionSpec", "KVCacheConfig", "SchedulerConfig"):
        assert len({EXAMPLES[name](), EXAMPLES[name]()}) == 1
    with pytest.raises(TypeError, match="unhashable"):
        hash(EXAMPLES["PromptSplit"]())


def test_content_makes_the_difference() -> None:
    assert BlockCopy(0, 1, 2) != BlockCopy(0, 1, 3)
    assert MultiModalItem("9af3", 4, 20) != MultiModalItem("9af3", 4, 21)
    split = kvledger.PromptSplit()
    split.hit = 4
    assert split != kvledger.PromptSplit()
    grown = new_blocks()
    grown.add(3, 0, make_blocks(9)[2:], 6)
    assert grown != new_blocks()


def test_enums_and_errors_are_kept_too() -> None:
    for cls in exported().values():
        if issubclass(cls, Enum):
            assert all(pickle.loads(pickle.dumps(member)) is member for member in cls)
    for name, cls in vars(kvledger.errors).items():
        if inspect.isclass(cls) and issubclass(cls, Exception):
            error = pickle.loads(pickle.dumps(cls(f"{name}: why")))
            assert (type(error), str(error)) == (cls, f"{name}: why")


# What a step brings to another process


def test_a_pickled_step_has_all_that_a_worker_needs() -> None:
    output = pickle.loads(pickle.dumps(output_with_everything()))
    assert output.num_tokens_by_request() == {"a": 7, "b": 3}
    assert bytes(memoryview(output.num_scheduled_tokens)) == b"\7\0\0\0\3\0\0\0"
    assert [data.token_ids for data in output.new_requests] == [list(range(7))] * 2
    assert output.new_requests[0].sampling_params == SamplingParams(seed=7)
    assert output.new_blocks.ids_by_row(2) == {0: ([], [8]), 3: ([7], [])}
    assert str(output.errors["huge"]) == "needs 9 blocks, the pool has 5"


def test_a_new_request_is_sent_as_it_was_when_it_was_scheduled() -> None:
    run = Run()
    data = run.first.new_requests[0]
    assert run.bills[0].request.num_tokens == 11
    assert pickle.loads(pickle.dumps(data)).token_ids == list(range(7))


def test_a_copy_of_a_step_is_not_the_step() -> None:
    engine = Engine(usable=8)
    engine.add("a", 4)
    output = engine.scheduler.schedule()
    with pytest.raises(kvledger.errors.KVLedgerError, match="step"):
        engine.scheduler.update_from_tokens(pickle.loads(pickle.dumps(output)), [7])
    engine.scheduler.update_from_tokens(output, [7])


# Requests


def content(req: Request) -> tuple[object, ...]:
    tokens = (req.request_id, req.tokens.token_ids(0, req.num_tokens), req.num_prompt_tokens, req.block_hashes)
    return (*tokens, req.status, req.num_computed_tokens, req.max_tokens, req.adapter, req.multimodal, req.priority)


@pytest.mark.parametrize("way", COPIES)
def test_a_copied_request_is_the_same_to_another_ledger(way: str) -> None:
    first = ledger(8)
    a = request("a", 7, adapter=Adapter("sql", 1), multimodal=(MultiModalItem("9af3", 1, 2),), priority=3)
    admit(first, a)
    decode(first, a)
    twin = COPIES[way](a)
    assert content(twin) == content(a)
    # It was computed there, not here: this ledger gives it blocks of its own.
    twin.num_computed_tokens = 0
    second = ledger(8)
    assert admit(second, twin) is not None
    assert ids(second, twin) == [1, 2]
    second.check()
    twin.append_token(5)
    assert (twin.num_tokens, a.num_tokens) == (9, 8)


def test_a_request_shows_where_it_stands() -> None:
    assert repr(request("a", 7)) == "Request('a', waiting, 7 prompt and 0 output tokens, 0 computed)"


# What belongs to a ledger


@pytest.mark.parametrize("way", COPIES)
def test_blocks_and_hits_stay_with_their_ledger(way: str) -> None:
    manager = ledger(8)
    blocks = admit(manager, a := request("a", 8))
    assert blocks is not None
    leave(manager, a)
    for what, instead in (
        (blocks, r"send get_block_ids\(\)"),
        (blocks.blocks[0][0], "send block_id"),
        (manager.get_computed_blocks(request("b", 8)), "send num_tokens"),
    ):
        with pytest.raises(TypeError, match=f"{type(what).__name__} cannot be copied.*{instead}"):
            COPIES[way](what)
