"""LoRA: what the slots of adapters take beside a model, as vLLM lays them out when it starts.

Every linear layer has room for two low-rank matrices of each slot, whatever an adapter fills: in layers that are
divided by their outputs the first is whole on every rank and the second divided, in those divided by their inputs the
other way round.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from kvledger.core.units import cdiv
from kvledger.models.config import ModelConfig
from kvledger.models.shards import Ranks, Weight

# Layers that hold two matrices side by side, each with a first matrix of its own.
DOUBLED = ("gate_up_proj",)
# Layers whose inputs are latents: the config's field of their size.
LATENT_INPUTS = {"q_b_proj": "q_lora_rank", "kv_b_proj": "kv_lora_rank"}
# Families whose classes take adapters of embedding and output head; the others have no room for them.
ADAPTED_EMBEDDINGS = frozenset((
    "apertus", "cohere", "cohere2", "exaone", "exaone4", "exaone_moe", "falcon_h1", "granite", "granitemoe",
    "granitemoehybrid", "granitemoeshared", "internlm3", "jamba", "lfm2", "lfm2_moe", "llama", "llama4_text", "minicpm",
    "minicpm3", "mixtral", "nemotron", "nemotron_h", "nemotron-nas", "phi3", "phimoe", "qwen3",
    "qwen3_moe", "qwen3_vl_text", "qwen3_vl_moe_text", "qwen3_5_text", "qwen3_5_moe_text", "solar",
))  # fmt: skip
# Routers of experts, which are never quantized and adapted like other layers.
ROUTERS = ".mlp.gate"


@dataclass(frozen=True)
class Adapters:
    """Slots for `count` adapters of up to `rank`. `whole_shards`: both matrices of a layer are divided."""

    count: int
    rank: int
    whole_shards: bool = False

    def params(self, config: ModelConfig, weights: Iterable[Weight], ranks: Ranks) -> int:
        """Parameters on one rank."""
        hidden = config.need("hidden_size")
        total = sum(
            self.layer_params(config, weight, ranks)
            for weight in weights
            if (weight.linear or weight.path.endswith(ROUTERS)) and weight.layer >= 0
        )
        if config.model_type in ADAPTED_EMBEDDINGS:
            total += 2 * self.rank * (hidden + config.need("vocab_size"))
        return self.count * total

    def layer_params(self, config: ModelConfig, weight: Weight, ranks: Ranks) -> int:
        if weight.expert:
            return self.expert_params(weight, ranks)
        name = weight.path.rsplit(".", 1)[-1]
        hidden = config.number(LATENT_INPUTS.get(name, "hidden_size")) or config.need("hidden_size")
        other = cdiv(weight.params, hidden)
        divided = cdiv(other, min(weight.parts, ranks.tensor))
        whole = hidden
        if self.whole_shards and weight.parts > 1:
            whole = cdiv(hidden, ranks.tensor)
        copies = 2 if name in DOUBLED else 1
        return self.rank * (copies * whole + divided)

    def expert_params(self, weight: Weight, ranks: Ranks) -> int:
        if not (weight.inner and weight.outer):
            return 0
        matrices = weight.params // (weight.inner * weight.outer)
        slices = 1 if ranks.whole_experts else ranks.experts
        outer = cdiv(weight.outer, slices) if self.whole_shards else weight.outer
        held = cdiv(matrices, ranks.experts) if ranks.whole_experts else matrices
        return held * self.rank * (outer + cdiv(weight.inner, slices))
