"""Settings for every test: hypothesis runs the same examples each time, and never judges by the clock."""

import os

from hypothesis import HealthCheck, settings

# KVLEDGER_LONG=50 runs every property 50 times as long, with fresh random examples.
LONG = int(os.environ.get("KVLEDGER_LONG", "1"))
QUIET = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]

settings.register_profile("default", deadline=None, derandomize=LONG == 1, suppress_health_check=QUIET, database=None)
settings.load_profile("default")
