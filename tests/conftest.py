"""Every test may ask for a `world` of ranks; see `tatami.testing.worlds`.

Properties draw the same examples in every run, and have no deadline: machines are busy.
"""

import os
from importlib import import_module
from typing import Any

import pytest
from hypothesis import settings

from parts import cost_s, group_of

pytest_plugins = ["tatami.testing.worlds"]
settings.register_profile("tatami", deadline=None, derandomize=True)
settings.load_profile("tatami")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where `pytest -n` shares the tests out, what takes longest begins."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        files = {item.path.name: group_of(item.nodeid) for item in items}
        cost_of_s = {group: sum(cost_s(file) for file in files if files[file] == group) for group in files.values()}
        items.sort(key=lambda item: -cost_of_s[group_of(item.nodeid)])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Each group of tests as one piece, in their order; marks for `--dist loadgroup` do nothing under pytest 9."""
    scheduler = import_module("xdist.scheduler").LoadScopeScheduling(config, log)
    scheduler._split_scope = group_of
    config.option.loadscopereorder = False
    return scheduler
