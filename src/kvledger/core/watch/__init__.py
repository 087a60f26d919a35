"""Observers of the ledger: why a prompt missed, how long blocks stay, and what changed in the cache."""
