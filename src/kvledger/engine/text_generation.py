"""From prompts to texts: what a command or a server puts around an Engine."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from kvledger.core.requests.request import RequestStatus
from kvledger.engine.engine import Engine, NewTokens
from kvledger.engine.sampling_params import SamplingParams
from kvledger.engine.text_stream import TextStream
from kvledger.errors import ConfigError, RequestTooLargeError

# In the words of most APIs.
FINISH_REASONS: Final = {
    RequestStatus.FINISHED_STOPPED: "stop",
    RequestStatus.FINISHED_LENGTH: "length",
    RequestStatus.FINISHED_ERROR: "error",
}


@dataclass
class Answer:
    """What became of one prompt so far. `finish_reason`: stop, length or error, or None while it goes on."""

    prompt: str
    prompt_token_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    error: str = ""


OnText = Callable[[int, str], None]


class TextGeneration:
    """Prompts that an engine works on together. `on_text`: hears of each prompt's number and the next piece of its
    text, and of an empty piece when it ends."""

    def __init__(self, engine: Engine, tokenizer: Any, on_text: OnText | None = None) -> None:
        self.answers: Final[list[Answer]] = []
        self._engine: Final = engine
        self._tokenizer: Final = tokenizer
        self._on_text: Final = on_text
        self._streams: Final[list[TextStream]] = []

    def add(self, prompt: str, params: SamplingParams, *, chat: bool = False) -> None:
        """Queues a prompt; one that can never fit ends with an error at once."""
        token_ids = self._encode(prompt, chat)
        number = len(self.answers)
        self.answers.append(Answer(prompt, token_ids))
        self._streams.append(TextStream(self._tokenizer, token_ids))
        try:
            self._engine.add_request(
                f"prompt {number + 1}", token_ids, params, on_tokens=lambda new: self._take(number, new)
            )
        except RequestTooLargeError as refused:
            self._end(number, "error", str(refused))

    def run(self) -> list[Answer]:
        """Works until all are answered."""
        self._engine.run()
        return self.answers

    def _encode(self, prompt: str, chat: bool) -> list[int]:
        if chat:
            if not self._tokenizer.chat_template:
                raise ConfigError("chat=True: the model has no chat template; leave it out")
            messages = [{"role": "user", "content": prompt}]
            prompt = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        # A template writes its own special tokens.
        token_ids: list[int] = self._tokenizer(prompt, add_special_tokens=not chat).input_ids
        return token_ids

    def _take(self, number: int, new: NewTokens) -> None:
        answer = self.answers[number]
        answer.token_ids += new.token_ids
        self._say(number, self._streams[number].add(new.token_ids))
        if new.finish is not None:
            self._say(number, self._streams[number].end())
            self._end(number, FINISH_REASONS[new.finish], "" if new.error is None else str(new.error))

    def _say(self, number: int, piece: str) -> None:
        self.answers[number].text += piece
        if piece and self._on_text is not None:
            self._on_text(number, piece)

    def _end(self, number: int, finish_reason: str, error: str) -> None:
        self.answers[number].finish_reason = finish_reason
        self.answers[number].error = error
        if self._on_text is not None:
            self._on_text(number, "")
