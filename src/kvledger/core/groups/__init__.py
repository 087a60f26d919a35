"""One manager per kind of KV cache group: how that kind of attention takes, shares, caches and gives back blocks."""
