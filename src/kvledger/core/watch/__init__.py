"""Observers of the ledger: why a prompt missed, and what changed in the cache."""
