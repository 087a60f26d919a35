"""SamplingParams: how one request chooses its tokens, and when it ends. Names and meanings are vLLM's."""

from dataclasses import dataclass

from kvledger.core.units import require_not_negative, require_positive
from kvledger.errors import wrong_value

# Below this a distribution is so sharp that dividing by it overflows; ask for the best token instead.
MIN_TEMPERATURE = 0.01


@dataclass(frozen=True)
class SamplingParams:
    """`temperature` 0 takes the best token each time (greedy). `top_k` keeps the so many most likely tokens (0: all),
    then `top_p` the fewest most likely ones that hold this share of what is left.

    With a `seed` a request gets the same tokens in any batch, after any preemption, with and without drafts; without
    one the worker's seed and the request's id stand in for it. `max_tokens` and `stop_token_ids` end a request; the
    model's own end-of-sequence tokens do too, unless `ignore_eos`.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    max_tokens: int = 16
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        # Written so that a NaN is refused as well.
        if not (self.temperature == 0.0 or MIN_TEMPERATURE <= self.temperature < float("inf")):
            raise wrong_value(
                "temperature", self.temperature, "not a temperature", f"give 0 (greedy) or at least {MIN_TEMPERATURE}"
            )
        if not 0.0 < self.top_p <= 1.0:
            raise wrong_value("top_p", self.top_p, "not a share of the probability", "give more than 0 and up to 1")
        require_not_negative("top_k", self.top_k)
        if self.seed is not None:
            require_not_negative("seed", self.seed)
        require_positive("max_tokens", self.max_tokens)
        for token_id in self.stop_token_ids:
            require_not_negative("stop_token_ids", token_id)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


GREEDY = SamplingParams()
