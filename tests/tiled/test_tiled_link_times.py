"""Which link is slow, at work: the times of messages go with the sum of the loss, and the link is named on all ranks."""

from typing import Self

import pytest
import torch
from test_tiled_retiling import ADAM, SAMPLES, Machine, data, network

from tatami.cluster import Cluster, Processor
from tatami.comm import AbstractCommunicator, AbstractRequest, WrappedCommunicator
from tatami.retiling import Retiler
from tatami.testing.worlds import World
from tatami.tiling import Layout, Replica
from tatami.train import Retiling, tile


class _Slow(AbstractRequest):
    """A message that takes so long, whether it is waited for or looked for."""

    def __init__(self, inner: AbstractRequest, machine: Machine, took_s: float) -> None:
        self._inner, self._machine, self._took_s = inner, machine, took_s

    def test(self) -> bool:
        if not self._inner.test():
            return False
        self._pass()
        return True

    def wait(self) -> None:
        self._inner.wait()
        self._pass()

    def _pass(self) -> None:
        self._machine.sleep(self._took_s)
        self._took_s = 0.0


class Links(WrappedCommunicator):
    """Messages take `base_s`, those between ranks 0 and 2 `factor` times as long, on the receiver's own clock."""

    machine = Machine(1.0)
    base_s, factor = 0.01, 1.0

    def irecv(self, tensor: torch.Tensor, source: int, *, tag: int = 0) -> AbstractRequest:
        slow = self.factor if {self.rank, source} == {0, 2} else 1.0
        return _Slow(super().irecv(tensor, source, tag=tag), self.machine, self.base_s * slow)

    def _before(self, operation: str, *, peer: int | None = None, tensor: torch.Tensor | None = None) -> None:
        pass

    def _wrap(self, part: AbstractCommunicator) -> Self:
        wrapped = type(self)(part)
        wrapped.machine = self.machine
        return wrapped


@pytest.mark.ranks(4)
def test_a_slow_link_is_named_on_all_ranks(world: World) -> None:
    built = network()
    cluster = Cluster(processors=tuple(Processor(name=f"p{i}", speed=1.0, host=f"h{i}") for i in range(4)))
    layout = Layout(replicas=tuple(Replica(width=0.5, processors=(f"p{i}", f"p{i + 1}"), heights=(0.5, 0.5)) for i in (0, 2)))

    def body(comm: AbstractCommunicator) -> list[tuple[tuple[str, str] | None, int, float]]:
        slow = Links(comm)
        slow.machine = machine = Machine(1.0)
        model = tile(
            built,
            slow,
            batch_size=SAMPLES,
            speeds=cluster,
            layout=layout,
            reduction="mean",
            quiet=True,
            clock=machine,
            pace=machine,
        )
        machine.model = model
        optimizer = ADAM(model.parameters())
        retiling = Retiling(model, optimizer, retiler=Retiler())
        own = model.comm
        assert isinstance(own, Links)
        x, y = data()

        def go(iterations: int) -> None:
            for _ in range(iterations):
                optimizer.zero_grad()
                torch.autograd.backward(torch.nn.functional.mse_loss(model(model.local(x)), model.local(y)))
                optimizer.step()
                retiling.step()

        go(20)
        assert retiling.watcher is not None
        assert retiling.watcher.alarms == []
        own.factor = 5.0
        go(6)
        return [(alarm.link, alarm.iteration, alarm.slower) for alarm in retiling.watcher.alarms]

    seen = world(body)
    assert all(each == seen[0] for each in seen)
    ((link, iteration, slower),) = seen[0]
    assert link == ("h0", "h2")
    assert iteration <= 24
    assert slower == pytest.approx(5.0, rel=0.1)
