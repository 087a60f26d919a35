"""The compiled core: requests, blocks, groups, the ledger, the scheduler and worker tables, one folder a floor."""
