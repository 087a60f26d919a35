"""One file a contestant. Each has version() and prepare(case), which returns an Operation, or says why it has none."""
