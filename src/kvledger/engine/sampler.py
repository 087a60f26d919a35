"""Sampler: from the logits of a step to its tokens, drafts verified on the way.

A request with k drafts has k + 1 rows of logits; row i holds what the model says about the token at position + i, if
drafts 0 .. i - 1 are right. Every row gets its token as if there were no drafts, and a draft is accepted while it is
that token:

    drafts     7   9   4
    tokens     7   9   2   6      -> 7 9 2: two drafts accepted, and the token that stands where the third was wrong

For a drafter that proposes without chance this is rejection sampling: a draft is accepted with the probability that
the model gives it, and a token that takes its place follows the model's distribution without it. And because the
chance of a position comes from the seed and the position alone, a request has the same tokens with and without drafts,
in any batch, and after any preemption. No generator with a state could promise that.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

import torch

from kvledger.engine.draft_verification import verify_drafts
from kvledger.engine.sampling_params import SamplingParams
from kvledger.errors import KVLedgerError


@dataclass(frozen=True)
class SampledRows:
    """The rows of one request: len(draft_token_ids) + 1 of them, next to each other.

    `position`: where in the sequence the token of the first row goes, which is the number of tokens known before it.
    """

    request_id: str
    params: SamplingParams
    position: int
    draft_token_ids: Sequence[int] = ()

    @property
    def num_rows(self) -> int:
        return len(self.draft_token_ids) + 1


class Sampler:
    """`seed` is for the requests that have none of their own."""

    def __init__(self, seed: int = 0) -> None:
        self._seed: Final = seed

    def sample(self, logits: torch.Tensor, requests: Sequence[SampledRows]) -> list[list[int]]:
        """The new tokens of each request, accepted drafts first: at least one, at most its number of rows.

        logits: [sum of num_rows, vocabulary], in the order of the requests. A draft of -1 (unknown) is never accepted.
        KVLedgerError for logits that are NaN, which no token can be chosen from.
        """
        num_rows = sum(request.num_rows for request in requests)
        if logits.dim() != 2 or logits.shape[0] != num_rows:
            raise KVLedgerError(f"logits of shape {list(logits.shape)}: the requests need {num_rows} rows")
        if not requests:
            return []
        tokens = self._choose(logits, requests)
        sampled: list[list[int]] = []
        start = 0
        for request in requests:
            sampled.append(verify_drafts(tokens[start : start + request.num_rows], request.draft_token_ids))
            start += request.num_rows
        return sampled

    def _choose(self, logits: torch.Tensor, requests: Sequence[SampledRows]) -> list[int]:
        """One token for each row."""
        best, tokens = logits.max(dim=-1)
        if bool(best.isnan().any()):
            raise KVLedgerError(f"request {_first_nan(best, requests)!r}: the model's logits are NaN")
        # Rows that draw, those that cut the distribution first apart: that needs a sort.
        whole, cut = _Draws(), _Draws()
        row = 0
        for request in requests:
            if not request.params.is_greedy:
                draws = whole if request.params.top_p == 1.0 and request.params.top_k == 0 else cut
                for offset in range(request.num_rows):
                    draws.add(row + offset, request.params, self._uniform(request, request.position + offset))
            row += request.num_rows
        if whole.rows:
            tokens[whole.rows] = _draw(whole.probabilities(logits), whole.uniforms)
        if cut.rows:
            probabilities, order = _keep_likely(cut.probabilities(logits), cut.params)
            drawn = _draw(probabilities, cut.uniforms)
            tokens[cut.rows] = order.gather(1, drawn.unsqueeze(1)).squeeze(1)
        chosen: list[int] = tokens.tolist()
        return chosen

    def _uniform(self, request: SampledRows, position: int) -> float:
        """A number in [0, 1) that belongs to this seed and position: 53 bits of a hash of them."""
        seed = request.params.seed
        key = f"seed {seed}" if seed is not None else f"request {self._seed} {request.request_id}"
        digest = blake2b(f"{key} {position}".encode(), digest_size=8).digest()
        return (int.from_bytes(digest, "big") >> 11) / 2.0**53


class _Draws:
    """Rows to draw a token for, each with its uniform number."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.params: list[SamplingParams] = []
        self.uniforms: list[float] = []

    def add(self, row: int, params: SamplingParams, uniform: float) -> None:
        self.rows.append(row)
        self.params.append(params)
        self.uniforms.append(uniform)

    def probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        """[rows, vocabulary] in float64: sums over a large vocabulary stay exact to the 53 bits that are drawn."""
        temperatures = [params.temperature for params in self.params]
        scale = torch.tensor(temperatures, dtype=torch.float64, device=logits.device).unsqueeze(1)
        return (logits[self.rows].double() / scale).softmax(dim=-1)


def _keep_likely(probabilities: torch.Tensor, params: Sequence[SamplingParams]) -> tuple[torch.Tensor, torch.Tensor]:
    """The probabilities sorted, those beyond top_k and then top_p set to 0; and the token ids in that order."""
    device = probabilities.device
    num_tokens = probabilities.shape[1]
    ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
    top_k = torch.tensor([one.top_k or num_tokens for one in params], device=device).unsqueeze(1)
    ordered = ordered * (torch.arange(num_tokens, device=device) < top_k)
    top_p = torch.tensor([one.top_p for one in params], dtype=torch.float64, device=device).unsqueeze(1)
    # A token stays while those before it hold less than top_p, so the most likely one always does.
    before = ordered.cumsum(dim=-1) - ordered
    return ordered * (before < top_p * ordered.sum(dim=-1, keepdim=True)), order


def _draw(weights: torch.Tensor, uniforms: Sequence[float]) -> torch.Tensor:
    """For each row the first index at which the running sum of the weights passes the row's share of their total."""
    sums = weights.cumsum(dim=-1)
    shares = torch.tensor(uniforms, dtype=torch.float64, device=weights.device).unsqueeze(1) * sums[:, -1:]
    # The share is below the total, up to rounding; an index at the end of the row would be no token.
    last = (weights > 0).long().cumsum(dim=-1).argmax(dim=-1)
    return torch.minimum(torch.searchsorted(sums, shares, right=True).squeeze(1), last)


def _first_nan(best: torch.Tensor, requests: Sequence[SampledRows]) -> str:
    owners = [request.request_id for request in requests for _ in range(request.num_rows)]
    return owners[int(best.isnan().long().argmax())]
