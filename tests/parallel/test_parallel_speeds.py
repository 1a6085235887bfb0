"""Weighted data parallelism: batches in proportion to speed, and gradients that stay those of the global batch."""

import copy
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drawing import mlp
from tatami.cluster import Cluster
from tatami.comm import AbstractCommunicator, run_threads
from tatami.errors import ClusterError, InputError, NotGivenError
from tatami.parallel import DataParallel, SynchronizedSampler
from tatami.parallel.speed_shares import SpeedShares

SPEEDS = [1.0, 0.5, 0.25, 1.0]
network = partial(mlp, 5, 9, 2, seed=3)


def data(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(samples)
    return tuple(torch.randn(samples, n, generator=generator, dtype=torch.float64) for n in (5, 2))  # type: ignore[return-value]


def test_the_mean_over_the_global_batch_is_exact(comm: AbstractCommunicator) -> None:
    x, y = data(22)
    plain = network()
    nn.functional.mse_loss(plain(x), y).backward()  # type: ignore[no-untyped-call]
    expected = [parameter.grad for parameter in plain.parameters()]
    speeds = SPEEDS[: comm.size]
    model = DataParallel(network(), comm, speeds=Cluster.from_speeds(speeds))
    x_here, y_here = model.local(x, y)
    nested = model.local((x, [y]), {"y": y})
    assert torch.equal(torch.cat((x_here, y_here, y_here), 1), torch.cat((nested[0][0], nested[0][1][0], nested[1]["y"]), 1))
    counts = comm.allgather_object(len(x_here))
    assert sum(counts) == 22
    assert max(abs(count - 22 * speed / sum(speeds)) for count, speed in zip(counts, speeds, strict=True)) < 1
    nn.functional.mse_loss(model(x_here), y_here).backward()  # type: ignore[no-untyped-call]
    for parameter, grad in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, grad, rtol=1e-12, atol=1e-14)
    model.close()


def test_a_loader_with_weighted_batches_trains_like_one_machine(comm: AbstractCommunicator) -> None:
    """Two epochs of 53 samples in batches of 16: the last one of 5 is shared out, too."""
    x, y = data(53)
    speeds = SPEEDS[: comm.size]
    dataset = TensorDataset(x, y, torch.arange(53))
    sampler = SynchronizedSampler(dataset, comm, share="exact", seed=1, speeds=speeds, global_batch=16)
    loader = DataLoader(dataset, batch_size=sampler.batch_size, sampler=sampler)
    model = DataParallel(network(), comm)
    plain = copy.deepcopy(model.module)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
    for _ in range(2):
        seen: list[int] = []
        assert len(sampler) == sum(len(each) for each in loader.batch_sampler or ())
        for x_here, y_here, numbers in loader:
            all_numbers = [number for each in comm.allgather_object(numbers.tolist()) for number in each]
            seen += all_numbers
            for each, inputs, targets in ((model, x_here, y_here), (plain, x[all_numbers], y[all_numbers])):
                each.zero_grad()
                nn.functional.mse_loss(each(inputs), targets).backward()  # type: ignore[no-untyped-call]
            for optimizer in optimizers:
                optimizer.step()
        assert sorted(seen) == list(range(53))
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)
    model.close()


@given(
    speeds=st.lists(st.floats(0.05, 1.0), min_size=1, max_size=6),
    batch=st.integers(60, 300),
    rest=st.floats(0, 1, exclude_max=True),
)
def test_every_rank_has_as_many_batches_as_the_others(speeds: list[float], batch: int, rest: float) -> None:
    samples = 2 * batch + int(rest * batch)

    def body(comm: AbstractCommunicator) -> list[int]:
        try:
            sampler = SynchronizedSampler(range(samples), comm, share="exact", speeds=speeds, global_batch=batch)
        except InputError:  # a rank too slow for this batch
            return []
        return [len(each) for each in torch.utils.data.BatchSampler(sampler, sampler.batch_size, drop_last=False)]

    sizes = run_threads(body, size=len(speeds))
    assert len({len(each) for each in sizes}) == 1
    if sizes[0]:
        totals = [sum(each) for each in zip(*sizes, strict=True)]
        left = samples - 2 * batch
        assert totals == [batch, batch] + [left] * (left >= len(speeds))


def test_what_cannot_be_shared_out_is_refused() -> None:
    def body(comm: AbstractCommunicator) -> None:
        with pytest.raises(InputError, match="there are 1 ranks but 2 speeds"):
            DataParallel(network(), comm, speeds=[1, 1])
        rule = ": speeds must be a Cluster or a number > 0 for each rank"
        with pytest.raises(ClusterError, match=rf"^DataParallel{rule}; speeds\[0\] must be a finite number > 0, not nan$"):
            DataParallel(network(), comm, speeds=[float("nan")])
        with pytest.raises(ClusterError, match=f"^DataParallel{rule}, not 'equal'$"):
            DataParallel(network(), comm, speeds="equal")  # type: ignore[arg-type]
        with pytest.raises(ClusterError, match=f"^SynchronizedSampler{rule}, not 1$"):
            SynchronizedSampler(range(4), comm, share="exact", speeds=1, global_batch=2)  # type: ignore[arg-type]
        with pytest.raises(InputError, match="speeds= and global_batch= go together"):
            SynchronizedSampler(range(4), comm, share="exact", speeds=[1])
        with pytest.raises(InputError, match="is for share='exact', not 'all'"):
            SynchronizedSampler(range(4), comm, speeds=[1], global_batch=2)
        with pytest.raises(InputError, match="at least 1, not 0"):
            SynchronizedSampler(range(4), comm, share="exact", speeds=[1], global_batch=0)
        with pytest.raises(NotGivenError, match="batch_size is known where speeds="):
            _ = SynchronizedSampler(range(4), comm).batch_size
        assert getattr(SynchronizedSampler(range(4), comm), "batch_size", 5) == 5
        model = DataParallel(network(), comm)
        with pytest.raises(InputError, match=r"same number of samples, not \[2, 3\]"):
            model.local(torch.zeros(2), torch.zeros(3))
        model.close()

    run_threads(body, size=1)

    def slow(comm: AbstractCommunicator) -> None:
        with pytest.raises(InputError, match=r"of a batch of 4 samples rank 1, of speed 0.01 among 2, would have none"):
            SpeedShares([1.0, 0.01], comm, where="here").span(4)

    run_threads(slow, size=2)
