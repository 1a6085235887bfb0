"""Every test may ask for a `world` of ranks; see `tatami.testing.worlds`."""

pytest_plugins = ["tatami.testing.worlds"]
