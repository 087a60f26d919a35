"""Blocks, the queue of the free ones, the index of the cached ones, and who else holds them."""
