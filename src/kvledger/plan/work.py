"""What a step of a model costs, in bytes and multiplications, for a roofline: over all GPUs of one replica.

Every weight is read once a step, of the routed experts those that some token is sent to; a token is multiplied with
every weight that it passes. Attention layers that read alike are one entry: their reach (a window or a chunk, 0: all
tokens), 2 flops for each value of a key and of a value that a query meets, and the bytes of a token.
"""

from collections import defaultdict

from kvledger.core.groups.spec import AttentionSpec, MambaSpec, MLAAttentionSpec
from kvledger.core.units import dtype_bytes
from kvledger.models.config import ModelConfig
from kvledger.models.experts import num_experts
from kvledger.models.layers import AttentionCache, LatentCache, Layer, StateCache
from kvledger.models.quantization import UnknownQuantizationError, WeightScheme, weight_scheme
from kvledger.models.weights import model_weights, reusing_layers, shape_of, weight_bytes
from kvledger.plan.plan import Plan

JSONValue = int | float | str | bool | None | list["JSONValue"] | dict[str, "JSONValue"]

# Window and chunk of a layer, 0 for none.
Reach = tuple[int, int]


def step_work(plan: Plan) -> dict[str, JSONValue]:
    """Parameters, weight bytes and attention of the plan's model, as numbers for `replay`."""
    facts = plan.facts
    config = facts.config
    scheme = loadable_scheme(config, plan.request.options.quantization)
    element = dtype_bytes(plan.settings.dtype)
    num_parameters = num_routed = 0
    counted = routed = 0.0
    for weight in model_weights(config, facts.layers):
        size = weight.params * weight_bytes(weight, scheme, element)
        num_parameters += weight.params
        counted += size
        if weight.expert:
            num_routed += weight.params
            routed += size
    ranks = plan.request.options.tensor_parallel_size
    total = ranks * sum(budget.weight_bytes for budget in plan.budgets)
    share = share_of_experts(config)
    return {
        "num_parameters": num_parameters,
        "num_active_parameters": num_parameters - num_routed + int(num_routed * share),
        "weight_bytes": total,
        "expert_bytes": int(total * routed / counted) if counted else 0,
        "expert_share": share,
        "attention": attention_work(plan),
        "state_bytes": state_bytes(plan),
    }


def loadable_scheme(config: ModelConfig, quantization: str) -> WeightScheme | None:
    """How the weights are stored, as far as it is known: a measured checkpoint of an unknown kind is planned too."""
    try:
        return weight_scheme(config, quantization)
    except UnknownQuantizationError:
        return None


def share_of_experts(config: ModelConfig) -> float:
    """Share of the routed experts that one token is sent to; 1.0 without any."""
    count = num_experts(config)
    return min(1.0, (config.number("num_experts_per_tok") or 1) / count) if count else 1.0


def attention_work(plan: Plan) -> list[JSONValue]:
    """One entry for all layers of a reach, the farthest first."""
    flops: dict[Reach, float] = defaultdict(float)
    sizes: dict[Reach, float] = defaultdict(float)
    facts = plan.facts
    for layer in (*facts.layers, *reusing_layers(facts.config, facts.layers)):
        if isinstance(layer.cache, AttentionCache | LatentCache):
            reach = reach_of(facts.config, layer)
            flops[reach] += flops_per_pair(facts.config, layer)
            sizes[reach] += bytes_per_token(plan, layer)
    return [
        {"window": reach[0], "chunk": reach[1], "flops_per_pair": flops[reach], "bytes_per_token": sizes[reach]}
        for reach in sorted(flops, key=lambda reach: (reach != (0, 0), -max(reach)))
    ]


def reach_of(config: ModelConfig, layer: Layer) -> Reach:
    cache = layer.cache
    if isinstance(cache, AttentionCache):
        return cache.window, cache.chunk
    assert isinstance(cache, LatentCache)
    # Sparse attention: the indexer reads all tokens, and the layer as many as it picks.
    chosen = 0 if layer.role == "indexer" else config.number("index_topk", 0) or 0
    return cache.window or chosen, 0


def flops_per_pair(config: ModelConfig, layer: Layer) -> float:
    """One multiply and one add for each value of key and value, in every head, that a query meets."""
    cache = layer.cache
    if isinstance(cache, AttentionCache):
        shape = shape_of(config, layer, cache)
        return 2.0 * shape.num_heads * (shape.head_size + shape.head_size_v)
    assert isinstance(cache, LatentCache)
    if layer.role == "indexer":
        return 2.0 * (config.number("index_n_heads") or 1) * cache.head_size
    expanded = sum(config.number(name, 0) or 0 for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    return 2.0 * config.need("num_attention_heads") * (expanded or 2 * cache.head_size) / cache.tokens_per_state


def bytes_per_token(plan: Plan, layer: Layer) -> float:
    """KV bytes of a token in that layer over all ranks that read them."""
    options = plan.request.options
    spec = layer.spec(plan.settings.cache)
    assert isinstance(spec, AttentionSpec | MLAAttentionSpec)
    ranks = options.tensor_parallel_size
    if spec.shards_over_context:
        ranks //= options.decode_context_parallel_size
    return spec.content_bytes * ranks / spec.block_size


def state_bytes(plan: Plan) -> int:
    """Bytes of the states of one request over all ranks. A step reads and writes them."""
    total = 0
    for layer in plan.facts.layers:
        if isinstance(layer.cache, StateCache):
            spec = layer.spec(plan.settings.cache)
            assert isinstance(spec, MambaSpec)
            total += spec.content_bytes
    return total * plan.request.options.tensor_parallel_size
