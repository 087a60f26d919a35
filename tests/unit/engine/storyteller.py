"""A worker with a language for a model, and an engine around it.

The worker keeps each token in the slot that the step gives it and reads the text back through its row of block ids, as
attention does. What it says next depends on the whole text, so a wrong block, a slot that was reused too early or a row
that is out of step changes the story.
"""

from collections.abc import Callable, Sequence

import pytest

from kvledger import KVCacheManager
from kvledger.engine import Drafter, Engine, NewTokens, OnStep
from kvledger.engine.draft_verification import verify_drafts
from kvledger.engine.sampling_params import SamplingParams
from kvledger.scheduler import RequestAccounting, Scheduler, SchedulerConfig, SchedulerOutput
from tests.helpers import ledger

Language = Callable[[Sequence[int]], int]


def rambling(text: Sequence[int]) -> int:
    """A language in which every token of the text counts."""
    word = 1
    for token_id in text:
        word = (word * 31 + token_id + 7) % 997
    return word


def chanting(text: Sequence[int]) -> int:
    """A language that repeats itself: 10 11 12 13 14 10 11 ..., whatever was said before."""
    return 10 + (text[-1] - 9) % 5 if 10 <= text[-1] <= 14 else 10


class Storyteller:
    """Greedy: the next token is what the language says."""

    def __init__(self, language: Language, block_size: int) -> None:
        self.language = language
        self.block_size = block_size
        self.rows: dict[str, list[int]] = {}
        self.texts: dict[str, list[int]] = {}
        self.slots: dict[int, int] = {}
        self.num_written = 0
        # What the next step dies of, before it hears anything of the step, or when so many requests are computed.
        self.dies_of: BaseException | None = None
        self.dies_after: int | None = None

    def execute(self, output: SchedulerOutput) -> list[list[int]]:
        if self.dies_of is not None and self.dies_after is None:
            raise self._last_words()
        for request_id in output.preempted_request_ids + output.finished_request_ids:
            self.rows.pop(request_id, None)
        for data in output.new_requests:
            self.rows[data.request_id] = list(data.block_ids[0])
            self.texts[data.request_id] = data.token_ids
        for request_id, block_ids in output.new_block_ids_by_request().items():
            self.rows[request_id] += block_ids[0]
        for copy in output.block_copies:
            for offset in range(self.block_size):
                source = copy.source_block_id * self.block_size + offset
                self.slots[copy.target_block_id * self.block_size + offset] = self.slots.get(source, -1)
        said: list[list[int]] = []
        for request_id, (start, end) in output.ranges_by_request().items():
            if self.dies_of is not None and len(said) == self.dies_after:
                raise self._last_words()
            said.append(self._continue(request_id, start, end, output.draft_token_ids.get(request_id, [])))
        return said

    def _last_words(self) -> BaseException:
        error, self.dies_of = self.dies_of, None
        assert error is not None
        return error

    def _continue(self, request_id: str, start: int, end: int, drafts: list[int]) -> list[int]:
        text = self.texts[request_id]
        for position, token_id in enumerate((text + drafts)[start:end], start):
            self.slots[self._slot(request_id, position)] = token_id
            self.num_written += 1
        read = [self.slots[self._slot(request_id, position)] for position in range(end)]
        if end < len(text):
            return []
        said = verify_drafts([self.language(read[:known]) for known in range(len(text), end + 1)], drafts)
        self.texts[request_id] = text + said
        return said

    def _slot(self, request_id: str, position: int) -> int:
        return self.rows[request_id][position // self.block_size] * self.block_size + position % self.block_size


class Stage:
    """An engine with a storyteller, and what everybody in the audience heard."""

    def __init__(
        self,
        language: Language = rambling,
        *,
        usable: int = 64,
        block_size: int = 4,
        max_model_len: int = 256,
        max_num_batched_tokens: int = 64,
        drafter: Drafter | None = None,
        num_speculative_tokens: int = 0,
        caching: bool = True,
        eos_token_ids: Sequence[int] = (),
        on_step: OnStep | None = None,
        accounts: bool = True,
    ) -> None:
        self.language = language
        self.manager: KVCacheManager = ledger(usable, block_size, max_model_len, enable_caching=caching)
        config = SchedulerConfig(
            max_num_seqs=8,
            max_num_batched_tokens=max_num_batched_tokens,
            num_speculative_tokens=num_speculative_tokens,
        )
        self.worker = Storyteller(language, block_size)
        self.engine = Engine(
            Scheduler(self.manager, config, accounting=RequestAccounting(self.manager) if accounts else None),
            self.worker,
            drafter=drafter,
            eos_token_ids=eos_token_ids,
            on_step=on_step,
        )
        self.heard: dict[str, list[int]] = {}
        self.ends: dict[str, str] = {}

    def add(self, request_id: str, prompt: int | list[int], max_tokens: int = 8, **params: object) -> None:
        text = list(range(prompt)) if isinstance(prompt, int) else prompt
        asked = SamplingParams(max_tokens=max_tokens, **params)  # type: ignore[arg-type]
        self.engine.add_request(request_id, text, asked, on_tokens=self.hear)

    def hear(self, new: NewTokens) -> None:
        self.heard.setdefault(new.request_id, []).extend(new.token_ids)
        if new.finish is not None:
            self.ends[new.request_id] = new.finish.name

    def step(self) -> list[NewTokens]:
        news = self.engine.step()
        self.check()
        return news

    def die(self, after: int | None = None) -> None:
        """A step whose worker raises: before it hears of the step, or when `after` of its requests are computed."""
        self.worker.dies_of, self.worker.dies_after = RuntimeError("the worker is out of memory"), after
        with pytest.raises(RuntimeError, match="out of memory"):
            self.engine.step()
        self.check()

    def run(self, max_steps: int = 500) -> int:
        for num_steps in range(max_steps):
            if not self.engine.has_unfinished_requests:
                return num_steps
            self.step()
        raise AssertionError(f"no end after {max_steps} steps")

    def check(self) -> None:
        """The ledger is sound, and the worker's rows are its tables."""
        self.engine.check()
        for request in self.engine.scheduler.running_requests():
            if request.request_id in self.worker.rows:  # else forked, and not sent yet
                assert self.worker.rows[request.request_id] == self.manager.get_block_ids(request.request_id)[0]

    def told(self, prompt: int | list[int], num_tokens: int) -> list[int]:
        """What the language alone makes of a prompt, without blocks."""
        text = list(range(prompt)) if isinstance(prompt, int) else list(prompt)
        for _ in range(num_tokens):
            text.append(self.language(text))
        return text[-num_tokens:]
