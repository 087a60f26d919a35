"""What does freeing a request cost, all of its full blocks cached?"""

from benchmarks.bench_admission import Ours as OurAdmission
from benchmarks.bench_admission import Theirs as TheirAdmission
from benchmarks.measure import Row, compare

QUESTION = "free of a request"


class Ours(OurAdmission):
    def before(self) -> None:
        super().before()
        super().run()

    def run(self) -> None:
        self.manager.free(self.request)

    def after(self) -> None:
        pass


class Theirs(TheirAdmission):
    def before(self) -> None:
        super().before()
        super().run()

    def run(self) -> None:
        self.manager.free(self.request)

    def after(self) -> None:
        pass


def run(quick: bool) -> list[Row]:
    rows: list[Row] = []
    for num_tokens, name in ((512, "512 tokens"), (32_768, "32k tokens")):
        sides = [side("admit", num_tokens, 0.0, "sha256") for side in (Ours, Theirs)]
        rows.append(compare(QUESTION, name, *sides, 3 if quick else 200 if num_tokens == 512 else 40))
    return rows
