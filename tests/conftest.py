"""Every test may ask for a `world` of ranks; see `tatami.testing.worlds`.

Properties draw the same examples in every run, and have no deadline: machines are busy.
"""

import os
from collections import defaultdict

import pytest
from hypothesis import settings

from parts import cost_s

pytest_plugins = ["tatami.testing.worlds"]
settings.register_profile("tatami", deadline=None, derandomize=True)
settings.load_profile("tatami")

START_RAY = ("server", "elastic", "test_sim_server_decisions.py")
"""One after the other: a second Ray of the machine would take the memory of the first, and what they leave is looked for."""


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where `pytest -n` shares the tests out, the tests of a file stay together, and all that start Ray; the longest begin."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return
    groups: dict[str, set[str]] = defaultdict(set)
    for item in items:
        groups[group_of(item)].add(item.path.name)
        item.add_marker(pytest.mark.xdist_group(group_of(item)))
    cost_of_s = {group: sum(map(cost_s, files)) for group, files in groups.items()}
    items.sort(key=lambda item: -cost_of_s[group_of(item)])


def group_of(item: pytest.Item) -> str:
    """The tests of a group are run by one process."""
    return "ray" if any(part in START_RAY for part in item.path.parts) else item.path.name
