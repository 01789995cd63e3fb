"""What all tests share."""

from hypothesis import settings

# A shared machine is slow at times; what a test shows does not depend on how long it takes.
settings.register_profile("padfree", deadline=None)
settings.load_profile("padfree")
