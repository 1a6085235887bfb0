"""Whether SimGrid can be used here, asked once for all tests that need it."""

import pytest

from tatami.errors import MissingExtraError
from tatami.sim.engine import require_simgrid


def _missing() -> str:
    try:
        require_simgrid()
    except MissingExtraError as error:
        return str(error)
    return ""


MISSING = _missing()
needs_simgrid = pytest.mark.skipif(bool(MISSING), reason=MISSING or "SimGrid is here")
