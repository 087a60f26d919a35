"""Every plan that real vLLM made and that is not doubtful, to the last digit, in both releases."""

from collections import Counter

import pytest

from kvledger.models.shards import Ranks
from kvledger.models.weights import rank_weight_bytes
from kvledger.plan.plan import make_plan
from kvledger.plan.pool import pipeline_stages
from kvledger.plan.refusal import RefusedError
from tests.golden.plan_records import Record, comparable, differences, records, refusal_kind, request_of

VERSIONS = ("0.33", "0.32")
EVERY = [(version, record) for version in VERSIONS for record in comparable(version)]


def label(value: object) -> str:
    return value if isinstance(value, str) else f"{value['run']}-{value['model']}" if isinstance(value, dict) else ""


@pytest.mark.parametrize(("version", "record"), EVERY, ids=label)
def test_plan_is_vllms(version: str, record: Record) -> None:
    request = request_of(record, version)
    kind = refusal_kind(record)
    if kind is not None:
        with pytest.raises(RefusedError) as refused:
            make_plan(request)
        assert refused.value.refusal.kind == kind
        return
    first = next(differences(make_plan(request), record), None)
    assert first is None, f"vLLM {version}, {record['run']}, {record['model']}: {first}"


@pytest.mark.parametrize("version", VERSIONS)
def test_nothing_was_left_out_unseen(version: str) -> None:
    kinds = Counter(refusal_kind(record) for record in comparable(version))
    assert len(records(version)) == 388
    assert kinds[None] == 290
    assert sum(kinds.values()) == 315


# Weights that differ by more than 0.5 %, with the reason.
WEIGHT_EXCEPTIONS = {
    (
        "h100_tp8",
        "google/gemma-3n-E4B",
    ): "vLLM divides parts of the speech and image towers",
    ("h100_tp8", "Zyphra/Zamba2-2.7B"): "vLLM divides the adapters of the shared block differently",
}


@pytest.mark.parametrize("version", VERSIONS)
def test_weight_bytes_of_a_rank(version: str) -> None:
    exceptions, compared = [], 0
    for record in records(version):
        if "weight_bytes_per_rank" not in record:
            continue
        compared += 1
        facts = request_of(record, version).facts
        ranks = Ranks(record["tp"], record["tp"])
        counted = rank_weight_bytes(facts.config, facts.layers, 2, ranks, pipeline_stages(facts.num_layers, 1))[0]
        if abs(counted.bytes / record["weight_bytes_per_rank"] - 1) > 0.005:
            exceptions.append((record["run"], record["model"]))
    assert sorted(exceptions) == sorted(WEIGHT_EXCEPTIONS)
    assert compared == 341
