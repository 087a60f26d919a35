"""The ledger: one door, a coordinator behind it that spreads a call over the groups, and the search for a hit."""
