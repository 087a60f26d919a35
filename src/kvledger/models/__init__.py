"""From a Hugging Face config.json to what each layer keeps in the KV cache and what the weights take.

config.py     the file itself: where the language model's fields are, what was assumed when one is missing
layers.py     what one layer caches, before an engine has chosen a block size, a dtype or a parallel size
patterns.py   which layers of a family are windowed, chunked or recurrent, as data
families.py   config -> layers, one small function for each kind of architecture
weights.py    config -> parameters and bytes for each rank
sources.py    a name, a file, a directory or a hub id -> config
"""
