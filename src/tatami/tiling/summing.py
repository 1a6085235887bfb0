"""Who sums how much of the gradients: less where bytes cost more.

Every owner of a group of units sends its gradients to those who sum them and receives the sums, so a part of the work is the
same for all. What an owner sums itself comes to it from C - 1 others and goes back to them. On a host with a tenth of a core,
which takes bytes into messages and out of them at a tenth of the pace of others, that part is left to others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from tatami.cluster import Cluster


def transfer_rates(cluster: Cluster) -> dict[str, float] | None:
    """Bytes/s that each processor sends and, at the same time, receives; None where they are alike.

    What the slowest host's link carries, at whose pace all go, or what it copies in and out: whichever is less. Links that are
    exceptions, and those inside of a host, are not looked at: parts that do not suit them cost time, and no exactness.
    """
    return cluster.transfer_bytes_per_s


def slowest_byte_s(cluster: Cluster, names: Iterable[str]) -> float:
    """Seconds that a byte takes over the slowest link of these processors' hosts; 0 where they are on one host."""
    hosts = {cluster.by_name[name].host for name in names}
    return max(1 / cluster.link_of(host).bandwidth_bytes_per_s for host in hosts) if len(hosts) > 1 else 0.0


def summing_shares(
    heights: Sequence[float], names: Sequence[str], *, replicas: int, rates: Mapping[str, float] | None
) -> dict[str, float] | None:
    """Each processor's share of its units that it sums, so that the slowest is done soonest.

    With h units a processor sends and receives h (1 + (C - 2) f) of them if it sums the share f. The shares are those of one
    time T for all, as far as they lie between 0 and 1; the owners of a group divide it in proportion to them.

    Args:
        heights: of each processor, its part of all units.
        names: of the same.
        replicas: C.
        rates: as `transfer_rates` has them.

    Returns:
        None where all sum the same share.
    """
    if rates is None or replicas <= 2:
        return None
    height = np.array(heights)
    rate = np.array([rates[name] for name in names])
    # What is summed within T grows by `rate` from where a processor has sent what it does not sum until it sums all of its own.
    begin, end = height / rate, (replicas - 1) * height / rate
    times = np.concatenate([begin, end])
    order = np.argsort(times, kind="stable")
    times, growth = times[order], np.cumsum(np.concatenate([rate, -rate])[order]) / (replicas - 2)
    summed = np.concatenate([[0.0], np.cumsum(growth[:-1] * np.diff(times))])
    last = min(int(np.searchsorted(summed, 1.0, side="left")), len(times) - 1)
    time = times[last - 1] + (1.0 - summed[last - 1]) / growth[last - 1]
    with np.errstate(divide="ignore"):
        wanted = (time / begin - 1) / (replicas - 2)
    return dict(zip(names, np.where(height > 0, np.clip(wanted, 0.0, 1.0), 0.0).tolist(), strict=True))
