"""Every test may ask for a `world` of ranks; see `tatami.testing.worlds`.

Properties draw the same examples in every run, and have no deadline: machines are busy.
"""

import faulthandler
import os
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from parts import cost_s, group_of

MUST_END_S = 300
pytest_plugins = ["tatami.testing.worlds"]
settings.register_profile("tatami", deadline=None, derandomize=True)
settings.load_profile("tatami")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--leave-to-mpiexec",
        type=lambda text: {int(size) for size in text.split(",")},
        metavar="RANKS,...",
        help="leave out worlds of so many ranks as threads, but for tests of the backends: `make test` runs them under mpiexec",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what other parts of `make test` have; where `pytest -n` shares tests out, what takes longest begins."""
    if sizes := config.getoption("leave_to_mpiexec"):
        left = {item for item in items if _is_left_to_mpiexec(item, sizes)}
        config.hook.pytest_deselected(items=list(left))
        items[:] = [item for item in items if item not in left]
    if "PYTEST_XDIST_WORKER" in os.environ:
        files = {item.path.name: group_of(item.nodeid) for item in items}
        cost_of_s = {group: sum(cost_s(file) for file in files if files[file] == group) for group in files.values()}
        items.sort(key=lambda item: -cost_of_s[group_of(item.nodeid)])


def _is_left_to_mpiexec(item: pytest.Item, sizes: set[int]) -> bool:
    if item.get_closest_marker("mpi") is None or item.path.parent.name == "comm":
        return False
    ranks: int = getattr(item, "callspec").params["world"]  # noqa: B009 -- pytest types it on functions only
    return ranks in sizes


def pytest_unconfigure() -> None:
    """A process whose tests are over ends, or says where each of its threads is."""
    faulthandler.dump_traceback_later(MUST_END_S, exit=True)


@pytest.fixture
def comm(world: Any) -> Any:
    """A test that asks for `comm` is what each rank of a `world` runs; paths that it asks for are those of rank 0."""
    return world


@pytest.fixture
def _sums_by_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients are summed by messages, which are described one by one, also among replicas of one host that share memory."""
    monkeypatch.setattr("tatami.model.seated_model.may_overlap", lambda _: False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An empty one, for ranks that share it."""
    return tmp_path


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    given = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    if "comm" not in given:
        return None
    run_on_ranks: Any = given.pop("comm")

    def run(comm: Any) -> None:
        own = {name: comm.bcast_object(value) if isinstance(value, Path) else value for name, value in given.items()}
        pyfuncitem.obj(comm=comm, **own)

    run_on_ranks(run)
    return True


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Each group of tests as one piece, in their order; marks for `--dist loadgroup` do nothing under pytest 9."""
    scheduler = import_module("xdist.scheduler").LoadScopeScheduling(config, log)
    scheduler._split_scope = group_of
    config.option.loadscopereorder = False
    return scheduler
