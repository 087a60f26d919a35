"""PagedModel: what a worker asks of a model, whoever's classes it is made of."""

from abc import ABC, abstractmethod

import torch

from kvledger.engine.paged_attention import PagedAttention


class PagedModel(ABC):
    """A model whose attention layers leave keys and values to a PagedAttention."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where its weights are, and the KV tensors must be."""

    @abstractmethod
    def logits(
        self, token_ids: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor, attention: PagedAttention
    ) -> torch.Tensor:
        """Runs the tokens of a flat batch, int64 [tokens] with their positions, through all layers.

        Returns the logits that follow the tokens at places `wanted` of the batch: [len(wanted), vocabulary].
        """
