"""Other speeds for a cluster: given on the command line, or estimated while training."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from tatami.cluster import Cluster
from tatami.errors import PlanError


def with_speeds(cluster: Cluster, speeds: Mapping[str, float] | Sequence[float]) -> Cluster:
    """The same cluster at `speeds`: by processor name, or in the order of the ranks.

    Raises:
        PlanError: a speed that is missing, zero, negative or not finite; a name or a number of speeds that does not fit.
    """
    names = [processor.name for processor in cluster.processors]
    if isinstance(speeds, Mapping):
        missing = [name for name in names if name not in speeds]
        unknown = [name for name in speeds if name not in cluster.by_name]
        if missing or unknown:
            raise PlanError(
                f"speeds must name the processors of the cluster: missing {missing or 'none'}, unknown {unknown or 'none'}"
            )
        listed = [speeds[name] for name in names]
    else:
        listed = list(speeds)
        if len(listed) != len(names):
            raise PlanError(
                f"{len(listed)} speeds for {len(names)} processors ({names[0]} to {names[-1]}): give one for each, in the "
                "order of the ranks"
            )
    for name, speed in zip(names, listed, strict=True):
        if not (math.isfinite(speed) and speed > 0):
            raise PlanError(f"the speed of {name} must be a finite number > 0, not {speed}")
    pairs = zip(cluster.processors, listed, strict=True)
    return replace(cluster, processors=tuple(replace(processor, speed=float(speed)) for processor, speed in pairs))
