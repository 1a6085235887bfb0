"""Every test may ask for a `world` of ranks; see `tatami.testing.worlds`. No property has a deadline: machines are busy."""

from hypothesis import settings

pytest_plugins = ["tatami.testing.worlds"]
settings.register_profile("busy", deadline=None)
settings.load_profile("busy")
