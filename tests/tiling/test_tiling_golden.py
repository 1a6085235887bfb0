"""Plans of the paper's perceptron under its conditions A and B, to the digit: what changes elsewhere must not change them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tatami.cluster import Cluster
from tatami.tiling import plan
from tatami.workload import Workload

CONDITIONS = {
    "A": (0.25, 0.31, 0.63, 1.0, 1.0, 0.42, 0.67, 0.63),
    "B": (0.63, 0.63, 0.63, 1.0, 0.63, 1.0, 1.0, 0.63),
}
GOLDEN: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "golden_plans.json").read_text())


@pytest.mark.parametrize("name", list(GOLDEN))
def test_plans_are_as_they_were(name: str) -> None:
    """Of equal plans `timed` may take any; where it lies is no part of the record."""
    condition, planner = name.split()
    cluster = Cluster.from_speeds(CONDITIONS[condition[0]][: int(condition[1:])])
    result = plan(planner, cluster=cluster, workload=Workload.mlp(203, 80, 26, samples=1024))
    golden = GOLDEN[name]
    assert result.t_comm == golden["t_comm"]
    assert result.predicted_s == pytest.approx(golden["predicted_s"], rel=1e-14)
    if "columns" in golden:
        columns = [
            [column[0].samples.size, {tile.processor: tile.units.size for tile in column}] for column in result.tiling.columns
        ]
        assert columns == golden["columns"]
