"""The ledger of one full-attention group in runs of blocks: the same numbers as block by block, for replays."""
