"""The report on releases that nobody follows, made from their own files: what it found once it finds again.

Their files are laid by scripts/make_reference.sh 0.31 0.30, as CI does; without them there is nothing to look at.
"""

import re
from dataclasses import dataclass

import pytest

from kvledger.integrations.vllm.drift import reference_folder, report


@dataclass(frozen=True)
class Findings:
    """`surface`: lines of it. `differ`, `hold`: kinds whose first seed differs from 0.32, or does not. `forced`: what
    the plugin would do."""

    surface: tuple[str, ...]
    differ: tuple[str, ...]
    hold: tuple[str, ...]
    forced: str


# Both take no state of the prompt's end inside larger blocks as 0.32 does, and find other hits with drafts over groups.
STATES_AND_DRAFTS = (
    "manager: qwen3-next, states in larger blocks",
    "manager: qwen3-next, hash units inside blocks",
    "manager: checkpoints",
    "manager: several groups copy",
    "manager: gpt-oss with a draft",
    "manager: gemma 3 with a marked draft",
)
PLAIN = ("manager: one group", "manager: gpt-oss", "manager: gemma 3", "manager: llama 4", "manager: qwen3-next")
FINDINGS = {
    "0.31": Findings(
        surface=(
            "v1.core.kv_cache_manager:KVCacheManager.allocate_slots: 'skip_zeroing_group_ids' is gone",
            "v1.core.sched.scheduler uses kv_cache_manager.get_zeroing_block_ids_in_range, which ours lacks",
        ),
        differ=STATES_AND_DRAFTS,
        hold=(*PLAIN, "scheduler: one group"),
        forced="Forced, it decides as 0.32: the same in ",
    ),
    "0.30": Findings(
        surface=(
            "v1.core.kv_cache_manager:KVCacheManager.__init__: 'enable_mamba_fine_grained_prefix_cache' is new",
            "v1.core.kv_cache_coordinator:KVCacheCoordinator.get_num_blocks_to_allocate: 'prefill_end' is gone",
            "the adapter cannot be imported: cannot import name 'to_event_extra_keys' from "
            "'vllm.v1.core.kv_cache_utils'",
        ),
        differ=STATES_AND_DRAFTS,
        hold=PLAIN,
        forced="Forced, it could not start: ImportError",
    ),
}


@pytest.mark.parametrize("release", FINDINGS)
def test_what_was_found_is_found(release: str) -> None:
    if not (reference_folder() / "releases" / release).exists():
        pytest.skip(f"scripts/make_reference.sh {release} lays its files")
    findings = FINDINGS[release]
    text = report(release, 1)
    lines = text.splitlines()
    assert {f"- {line}" for line in findings.surface} <= set(lines)
    found = {kind: int(number) for kind, number in re.findall(r"^\| (.+?) \| (\d+) of 1 \|", text, re.MULTILINE)}
    assert [found[kind] for kind in findings.differ] == [1] * len(findings.differ), text
    assert [found[kind] for kind in findings.hold] == [0] * len(findings.hold), text
    assert any(line.startswith(findings.forced) for line in lines), text
