"""What holds for every test: nothing random that can't be repeated, and no more threads than cores."""

from __future__ import annotations

import os

from hypothesis import settings

pytest_plugins = ["ckptstore.testing.plugin"]

# Before anything imports torch: the test workers already use every core.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The same examples on each run, so that a red run is about the change at hand; HYPOTHESIS_PROFILE=explore looks
# further. No deadline: on a shared machine the time an example takes says nothing.
settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
settings.register_profile("explore", deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))
