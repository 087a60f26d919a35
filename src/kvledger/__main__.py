from kvledger.cli import entry_point

entry_point()
