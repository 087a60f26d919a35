"""What vLLM would refuse, as data: the kind of refusal, its message and, once computed, the ways out."""

from dataclasses import dataclass

from kvledger.errors import ConfigError

HEADS = "heads_not_divisible"
CONTEXT_RANKS = "context_parallel_not_possible"
STATE_BLOCKS = "state_blocks_not_possible"
NO_BACKEND = "no_attention_backend"
NO_PROMOTION = "specs_not_unifiable"
QUANTIZATION = "weights_not_loadable"
TOO_LONG = "max_model_len_too_long"
NO_MEMORY = "no_available_memory"
DOES_NOT_FIT = "request_does_not_fit"


@dataclass(frozen=True)
class Refusal:
    """One refusal. `ways_out`: changes that were computed to work, best first."""

    kind: str
    message: str
    ways_out: tuple[str, ...] = ()


class RefusedError(ConfigError):
    """The engine would not start with these options, whatever the memory."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.refusal = Refusal(kind, message)
