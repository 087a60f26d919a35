"""Percentiles with weights, timelines that stay short, plots."""

import math

import pytest

from kvledger.core.blocks.block_pool import PoolOccupancy
from kvledger.metrics.samples import ACCURACY, EXACT, WeightedSamples
from kvledger.replay.meters import TimelineMeter
from kvledger.replay.plot import bars, resample, stacked_bars


def samples(*pairs: tuple[float, float]) -> WeightedSamples:
    made = WeightedSamples()
    for value, weight in pairs:
        made.add(value, weight)
    return made


class TestWeightedSamples:
    def test_weights_count_as_so_many_equal_values(self) -> None:
        meter = samples((1.0, 3), (5.0, 1))
        assert meter.mean() == 2.0
        assert meter.percentile(0.5) == 1.0
        assert meter.percentile(0.75) == 1.0
        assert meter.percentile(0.76) == 5.0
        assert meter.peak() == 5.0

    def test_percentiles_do_not_depend_on_the_order(self) -> None:
        assert samples((5.0, 1), (1.0, 3)).percentiles() == samples((1.0, 3), (5.0, 1)).percentiles()

    def test_many_small_weights_add_up(self) -> None:
        assert samples(*[(float(value), 0.1) for value in range(1, 101)]).percentile(0.95) == 95.0

    def test_nothing_has_no_percentiles_and_no_usage(self) -> None:
        assert samples().percentiles() is None
        assert samples().usage().peak == 0.0

    def test_many_values_take_no_more_memory_and_stay_within_the_accuracy(self) -> None:
        """Each value from 1 to 3 times as many as are held comes once."""
        last = 3 * EXACT + 5
        meter = samples(*[(float(value), 0.25) for value in range(last, 0, -1)])
        assert meter.num_held < EXACT
        assert meter.peak() == last
        assert meter.mean() == pytest.approx((last + 1) / 2)
        for share in (0.001, 0.5, 0.99):
            assert meter.percentile(share) == pytest.approx(math.ceil(share * last), rel=ACCURACY)
        assert meter.percentile(1.0) <= last
        assert meter.total_weight == pytest.approx(last / 4)

    def test_zeros_are_values(self) -> None:
        meter = samples(*[(0.0, 1.0)] * EXACT, (7.0, 1.0))
        assert (meter.percentile(0.5), meter.peak()) == (0.0, 7.0)


class TestTimeline:
    def test_an_interval_keeps_the_peaks_of_its_steps_and_the_pool_at_its_end(self) -> None:
        meter = TimelineMeter(1.0, 10)
        meter.peak_running = 3
        meter.peak_waiting = 7
        meter.close_intervals(1.2, PoolOccupancy(5, 1, 4))
        meter.peak_running = 2
        meter.end(PoolOccupancy(0, 6, 4))
        timeline = meter.timeline()
        assert (timeline.interval, timeline.running, timeline.waiting) == (1.0, [3, 2], [7, 0])
        assert (timeline.live, timeline.cached) == ([0.5, 0.0], [0.1, 0.6])
        assert meter.shares().live == 0.25

    def test_too_many_intervals_become_half_as_many_twice_as_long(self) -> None:
        meter = TimelineMeter(1.0, 10)
        for step in range(1, meter.MAX_INTERVALS + 1):
            meter.peak_running = step
            meter.close_intervals(float(step), PoolOccupancy(step % 10, 0, 0))
        timeline = meter.timeline()
        assert timeline.interval == 2.0
        assert timeline.running == list(range(2, meter.MAX_INTERVALS + 1, 2))
        assert meter.next_time == meter.MAX_INTERVALS + 2.0

    def test_a_long_step_counts_for_every_interval_that_it_spans(self) -> None:
        meter = TimelineMeter(1.0, 10)
        meter.peak_running = 4
        meter.close_intervals(3.5, PoolOccupancy(0, 0, 10))
        assert meter.timeline().running == [4, 4, 4]


class TestPlots:
    def test_resampling_keeps_peaks_and_repeats_what_is_short(self) -> None:
        assert resample([1.0, 9.0, 2.0, 3.0], 2) == [9.0, 3.0]
        assert resample([1.0, 2.0], 4) == [1.0, 1.0, 2.0, 2.0]
        assert resample([], 3) == [0.0, 0.0, 0.0]

    def test_a_bar_fills_cells_from_the_bottom_in_eighths(self) -> None:
        assert bars([0.0, 8.0, 12.0, 16.0], 16.0, 2) == ["  ▄█", " ███"]

    def test_what_is_not_zero_shows(self) -> None:
        assert bars([0.001], 1000.0, 1) == ["▁"]

    def test_stacked_shares_meet_within_a_cell(self) -> None:
        (line,) = stacked_bars([0.5], [0.5], 1, ("blue", "green"))
        assert line.plain == "▄"
        assert str(line.spans[0].style) == "blue on green"


def test_percentile_of_one_value_is_that_value() -> None:
    assert samples((2.5, 1)).percentile(0.01) == pytest.approx(2.5)
