"""What all tests share."""

from hypothesis import HealthCheck, settings

# A shared machine is slow at times; what a test shows does not depend on how long it takes. Nor on chance:
# every run tries the same examples, so that none fails for what was not changed. To look for more:
# pytest --hypothesis-profile=explore
slow = [HealthCheck.too_slow]
settings.register_profile("padfree", deadline=None, suppress_health_check=slow, derandomize=True)
settings.register_profile("explore", deadline=None, suppress_health_check=slow, print_blob=True)
settings.load_profile("padfree")
