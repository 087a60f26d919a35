from benchmarks.peers.command import entry_point

entry_point()
