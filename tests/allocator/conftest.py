"""Hypothesis profiles of the allocator's state machine; `ALLOCATOR_PROFILE` names the one to use.

They are registered, not loaded: settings of other tests stay as they are. No profile is derandomised: every run draws
fresh examples, and prints how to repeat a failure.
"""

from hypothesis import HealthCheck, Phase, settings

_SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]
_COMMON = settings(derandomize=False, deadline=None, print_blob=True, suppress_health_check=_SLOW)

settings.register_profile("allocator", _COMMON, max_examples=50, stateful_step_count=40)
settings.register_profile("allocator-quick", _COMMON, max_examples=20, stateful_step_count=40)
# One fault at a time: the first failure will do, and nobody reads a shrunk example.
settings.register_profile(
    "allocator-mutants", _COMMON, max_examples=150, stateful_step_count=40, phases=[Phase.generate], database=None
)
settings.register_profile("allocator-long", _COMMON, max_examples=100_000, stateful_step_count=60)
