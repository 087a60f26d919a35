"""How much fits, exactly, before launch: pure functions from a model, a card and engine options to a plan.

options.py    what the user asks for, under vLLM's option names
versions.py   what differs between vLLM releases, as data
gpus.py       the cards and their real bytes
engine.py     options -> settings: defaults by card and entry point, dtypes, prefix caching, tokens in flight
backends.py   which attention kernels a card runs, and the block sizes that they accept
layers_to_specs in specs.py; groups.py: like layers, page sizes, padding; pool.py: blocks, tokens, concurrency
memory.py     where the card's bytes go, each term with its source
plan.py       all of it in order; ways_out.py what would fit instead; layout.py groups that waste less
logs.py       the same numbers read back from a vLLM start-up log
"""
