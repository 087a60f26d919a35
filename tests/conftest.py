"""Settings for every test: hypothesis runs the same examples each time, and never judges by the clock.

KVLEDGER_LONG=50 runs every property 50 times as long, with fresh random examples.
"""

import os

from hypothesis import HealthCheck, settings

# Tests read bundled models, whatever a hub says of them.
os.environ["HF_HUB_OFFLINE"] = "1"

LONG = int(os.environ.get("KVLEDGER_LONG", "1"))

settings.register_profile(
    "kvledger",
    max_examples=100 * LONG,
    deadline=None,
    derandomize=LONG == 1,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)
settings.load_profile("kvledger")
