"""Errors come through pickle whole: an elastic run's ranks send theirs to the process that started it."""

from __future__ import annotations

import pickle

import pytest

from tatami import errors


@pytest.mark.parametrize(
    "error",
    [
        errors.RankDiedError("gone", rank=3),
        errors.NotFiniteError("nan", rank=1, iteration=None),
        errors.MemoryLackError("too much", lacking_bytes={"p0": 8.0}),
        errors.MissingExtraError("ray", extra="server"),
        errors.ClusterError("wrong", problems=["speed", "memory"]),
        errors.InputError("bad"),
        errors.OutputExistsError("there"),
    ],
)
def test_an_error_is_the_same_after_pickle(error: errors.TatamiError) -> None:
    there = pickle.loads(pickle.dumps(error))
    assert type(there) is type(error)
    assert str(there) == str(error)
    assert vars(there) == vars(error)


def test_no_error_is_left_out() -> None:
    """Whoever adds one with arguments of its own finds this."""
    own = {kind.__name__ for kind in vars(errors).values() if isinstance(kind, type) and "__init__" in vars(kind)}
    assert own == {"ClusterError", "MemoryLackError", "MissingExtraError", "NotFiniteError", "RankDiedError"}
