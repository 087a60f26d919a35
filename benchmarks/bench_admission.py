"""What does admitting a prompt cost: hashing it, looking it up and allocating it?

The pool is full of cached blocks, as in service, so every block taken evicts one. Ours packs the prompt first; that
counts as hashing, since nothing else needs it.
"""

from collections.abc import Iterator

from benchmarks.measure import Row, Side, compare
from benchmarks.subjects import our_admit, our_manager, prompts, their_admit, their_factory, their_manager
from kvledger import Request

NUM_BLOCKS = 16_384
FILLER_TOKENS = 32_768
PARTS = {
    "all": "admission, hash included",
    "hash": "hashing a prompt alone",
    "admit": "admission, hashes known",
}


def traffic(num_tokens: int, hit_share: float) -> Iterator[list[int]]:
    """Prompts of which that share, from the front, is cached (once the first of them was admitted)."""
    num_shared = int(num_tokens * hit_share)
    shared = prompts(1, num_tokens, seed=1)[0][:num_shared]
    seed = 100
    while True:
        seed += 1
        yield shared + prompts(1, num_tokens - num_shared, seed)[0]


class Ours(Side):
    def __init__(self, part: str, num_tokens: int, hit_share: float, hash_name: str) -> None:
        self.part = part
        self.manager = our_manager(NUM_BLOCKS, hash_name)
        for index, prompt in enumerate(prompts(NUM_BLOCKS * 16 // FILLER_TOKENS, FILLER_TOKENS, seed=2)):
            filler = Request(f"filler{index}", prompt)
            our_admit(self.manager, filler)
            self.manager.free(filler)
        self.traffic = traffic(num_tokens, hit_share)
        self.hasher = self.manager._hasher

    def before(self) -> None:
        self.prompt = next(self.traffic)
        if self.part == "admit":
            self.request = Request("r", self.prompt)
            self.hasher.extend(self.request)

    def run(self) -> None:
        if self.part == "admit":
            our_admit(self.manager, self.request)
            return
        self.request = Request("r", self.prompt)
        if self.part == "hash":
            self.hasher.extend(self.request)
        else:
            our_admit(self.manager, self.request)

    def after(self) -> None:
        if self.part != "hash":
            self.manager.free(self.request)


class Theirs(Side):
    def __init__(self, part: str, num_tokens: int, hit_share: float, hash_name: str) -> None:
        self.part = part
        self.manager = their_manager(NUM_BLOCKS)
        self.factory = their_factory(hash_name)
        for index, prompt in enumerate(prompts(NUM_BLOCKS * 16 // FILLER_TOKENS, FILLER_TOKENS, seed=2)):
            filler = self.factory.make(f"filler{index}", prompt)
            their_admit(self.manager, filler)
            self.manager.free(filler)
        self.traffic = traffic(num_tokens, hit_share)

    def before(self) -> None:
        # Making one of their requests hashes it and does much more that is no part of the question; so it is made
        # here and, where hashing is asked for, hashed again from nothing.
        self.request = self.factory.make("r", next(self.traffic))
        if self.part != "admit":
            self.request.block_hashes.clear()

    def run(self) -> None:
        if self.part != "admit":
            self.request.update_block_hashes()
        if self.part != "hash":
            their_admit(self.manager, self.request)

    def after(self) -> None:
        if self.part != "hash":
            self.manager.free(self.request)


def run(quick: bool) -> list[Row]:
    rows: list[Row] = []
    for part, question in PARTS.items():
        for num_tokens, name in ((512, "512 tokens"), (32_768, "32k tokens")):
            for hash_name in ("sha256",) if part == "admit" else ("sha256", "xxh3"):
                for hit_share in (0.0,) if part == "hash" else (0.0, 0.5, 1.0):
                    case = name if part == "hash" else f"{name}, {hit_share:.0%} hit"
                    if part != "admit":
                        case += f", {hash_name}"
                    sides = [side(part, num_tokens, hit_share, hash_name) for side in (Ours, Theirs)]
                    repeats = 3 if quick else 200 if num_tokens == 512 else 40
                    rows.append(compare(question, case, *sides, repeats))
    return rows
