"""A scheduler that drives the ledger, as vLLM's does: three passes over requests, and what they share."""
