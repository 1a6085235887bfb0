"""A batch shared out among ranks by their speeds: weighted data parallelism."""

from __future__ import annotations

from collections.abc import Sequence

from tatami.cluster import Cluster, listed_speeds
from tatami.comm.base import AbstractCommunicator
from tatami.errors import InputError
from tatami.tiling import Span, spans, whole_shares


class SpeedShares:
    """Which samples of a batch each rank computes, in proportion to its speed. The same on all ranks; sends nothing.

    Args:
        speeds: of the ranks, in their order; only ratios count.
        comm: the ranks.
        where: who asks, for errors.

    Raises:
        InputError: not one speed for each rank.
        ClusterError: something else than numbers > 0, or a speed that depends on the size of the tile.
    """

    def __init__(self, speeds: Cluster | Sequence[float], comm: AbstractCommunicator, *, where: str) -> None:
        if isinstance(speeds, Cluster):
            cluster = speeds
        else:
            rule = f"{where}: speeds must be a Cluster or a number > 0 for each rank"
            cluster = Cluster.from_speeds(listed_speeds(speeds, rule=rule))
        if cluster.size != comm.size:
            raise InputError(f"{where}: there are {comm.size} ranks but {cluster.size} speeds; give one for each rank")
        self.speeds = cluster.plain_speeds(where)
        self._rank, self._where = comm.rank, where

    def sizes(self, samples: int) -> tuple[int, ...]:
        """The samples of every rank, of a batch of `samples`.

        Raises:
            InputError: a rank would have none, whose mean loss is not a number.
        """
        found = whole_shares(self.speeds, total=samples)
        if 0 in found:
            rank = found.index(0)
            raise InputError(
                f"{self._where}: of a batch of {samples} samples rank {rank}, of speed {self.speeds[rank]:g} among "
                f"{len(found)}, would have none. Take larger batches, or leave that rank out"
            )
        return found

    def span_of_rest(self, samples: int, *, of: int) -> Span | None:
        """This rank's of a last, smaller batch: at least one, and never more than of a whole batch `of` so many samples.

        None on all ranks where there are fewer samples than ranks.
        """
        if samples < len(self.speeds):
            return None
        most = self.sizes(of)
        found = list(whole_shares(self.speeds, total=samples))
        # Rounding may give a rank none, or one more than of the whole batch.
        while 0 in found or any(size > limit for size, limit in zip(found, most, strict=True)):
            fill = [size / limit for size, limit in zip(found, most, strict=True)]
            giver = max((rank for rank in range(len(found)) if found[rank] > 1), key=fill.__getitem__)
            found[giver] -= 1
            found[fill.index(min(fill))] += 1
        return spans(found)[self._rank]

    def span(self, samples: int) -> Span:
        """Which of a batch of `samples` are this rank's."""
        return spans(self.sizes(samples))[self._rank]
