"""Values that some families leave out of config.json because their Hugging Face class has a default for them.

Only fields that decide cache or weight sizes. A default that is used is noted, so the plan says what it assumed.
Source: the configuration classes of transformers 5 (facts: the numbers are those of each family's first model).
"""

CLASS_DEFAULTS: dict[str, dict[str, object]] = {
    "llama": {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "vocab_size": 32000,
        "max_position_embeddings": 2048,
    },
    "mistral": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
    },
    "qwen2": {"num_key_value_heads": 32, "max_position_embeddings": 32768},
    "gpt2": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "vocab_size": 50257},
    "gemma": {"head_dim": 256},
    "gemma2": {"head_dim": 256, "sliding_window": 4096},
    "gemma3_text": {
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 4096,
        "max_position_embeddings": 131072,
    },
    "llama4_text": {"attention_chunk_size": 8192, "head_dim": 128, "vocab_size": 202048},
    "gpt_oss": {"head_dim": 64, "sliding_window": 128},
    "cohere2": {"sliding_window": 4096},
    "whisper": {"max_source_positions": 1500, "max_target_positions": 448},
    "mamba": {"state_size": 16, "conv_kernel": 4, "expand": 2},
    "falcon_mamba": {"state_size": 16, "conv_kernel": 4, "expand": 2},
    "mamba2": {"state_size": 128, "conv_kernel": 4, "expand": 2, "n_groups": 8, "head_dim": 64, "num_heads": 128},
    "jamba": {"mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2},
    "qwen3_next": {
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "head_dim": 256,
        "full_attention_interval": 4,
    },
}
