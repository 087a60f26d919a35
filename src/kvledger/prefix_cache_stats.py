"""Counts of prefix-cache lookups since they were last taken, as vLLM counts them: per admission, in tokens."""


class PrefixCacheStats:
    """Lookups of requests that were preempted before are counted apart: finding one's own blocks is no reuse."""

    def __init__(self) -> None:
        self.requests: int = 0
        self.queries: int = 0  # tokens looked up
        self.hits: int = 0  # tokens found
        self.preempted_requests: int = 0
        self.preempted_queries: int = 0
        self.preempted_hits: int = 0
        self.reset: bool = False  # the cache was reset since

    def record(self, num_tokens: int, num_hits: int, preempted: bool) -> None:
        if preempted:
            self.preempted_requests += 1
            self.preempted_queries += num_tokens
            self.preempted_hits += num_hits
        else:
            self.requests += 1
            self.queries += num_tokens
            self.hits += num_hits
