"""Property tests of this folder: the same examples at every run, and no deadline, which a loaded machine would miss."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "echo", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("echo")
