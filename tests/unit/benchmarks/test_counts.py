"""The comparison with committed counts: what it lets pass, and what it says of the rest."""

from benchmarks.instructions import read_counts, worse
from benchmarks.slow_operations import HOT, find, more


def test_ten_percent_more_instructions_pass_and_more_do_not() -> None:
    committed = {"free": 1000.0, "step": 2000.0}
    assert worse(committed, {"free": 1100.0, "step": 500.0}) == []
    assert worse(committed, {"free": 1101.0}) == ["free: 1,101 instructions, 10% more than the committed 1,000"]
    assert worse(committed, {"slots": 7.0}) == ["slots: 7 instructions, and no committed count"]


REPORT = """<h2><tt>src/kvledger/core/blocks/block.py</tt></h2>
<pre>    1  import x
<span><div class="collapsible" style="background-color: #fcc">    2      a &lt; b()
</div><div class="content">       <div class="hint">Generic comparison operation.</div></div></span>
<span><div class="collapsible" style="background-color: #fcc">    3  def c(self) -&gt; None:
</div><div class="content">       <div class="hint">Call non-native method "c".</div></div></span></pre>
<h2><tt>src/kvledger/core/groups/base.py</tt></h2><pre>    1  pass</pre>"""


def test_slow_lines_are_read_from_the_report() -> None:
    assert find(REPORT) == {"blocks/block": ["2      a < b()  <- Generic comparison operation."], "groups/base": []}


def test_a_module_with_more_slow_lines_is_named_with_its_lines() -> None:
    found = {**{module: [] for module in HOT}, **find(REPORT)}
    assert more({"blocks/block": 1}, found) == []
    assert more({"blocks/block": 0}, found) == [
        "blocks/block: 1 slow lines, 0 committed:",
        "    2      a < b()  <- Generic comparison operation.",
    ]


def test_everything_that_is_compared_has_a_committed_count() -> None:
    from benchmarks.counted_operations import OPERATIONS

    counts = read_counts()
    assert counts["instructions"].keys() == OPERATIONS.keys()
    assert counts["slow_lines"].keys() == set(HOT)
