"""Every test may ask for a `world` of ranks; see `tatami.testing.worlds`.

Properties draw the same examples in every run, and have no deadline: machines are busy.
"""

from hypothesis import settings

pytest_plugins = ["tatami.testing.worlds"]
settings.register_profile("tatami", deadline=None, derandomize=True)
settings.load_profile("tatami")
