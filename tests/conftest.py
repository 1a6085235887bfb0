"""Every test may ask for a `world` of ranks; see `tatami.testing.worlds`.

Properties draw the same examples in every run, and have no deadline: machines are busy.
"""

from pathlib import Path

import pytest
from hypothesis import settings

pytest_plugins = ["tatami.testing.worlds"]
settings.register_profile("tatami", deadline=None, derandomize=True)
settings.load_profile("tatami")

START_RAY = ("server", "elastic", "test_sim_server_decisions.py")
"""One after the other: a second Ray of the machine would take the memory of the first, and what they leave is looked for."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where `pytest -n 2` shares the tests out, the tests of a file stay together, and all that start Ray."""
    if config.pluginmanager.hasplugin("xdist"):
        for item in items:
            starts_ray = any(part in START_RAY for part in Path(item.path).parts)
            item.add_marker(pytest.mark.xdist_group("ray" if starts_ray else item.path.name))
