"""`random="local"`: layers that cannot draw as the plain model does draw for each replica by itself, its ranks alike."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from drawing import Written, one_at_a_time
from tatami.comm.base import AbstractCommunicator
from tatami.errors import InputError, ModelError
from tatami.testing.worlds import World
from tatami.train import TiledModel, find_blocks, tile
from tiled_rig import simple_layout

pytestmark = pytest.mark.ranks(2)

P = 0.5


def noisy(net: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """An LSTM with dropout inside, and a functional one; the second result tells what was dropped."""
    dropped = F.dropout(torch.ones_like(x), P, net.training)
    output, _ = net.lstm(x)
    return net.head(output[:, -1]), dropped


@one_at_a_time
def network() -> nn.Module:
    torch.manual_seed(1)
    return Written(
        noisy,
        lstm=nn.LSTM(3, 4, num_layers=2, dropout=P, batch_first=True),
        head=nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)),
    )


def passes(model: TiledModel, x: torch.Tensor, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    results = []
    for _ in range(count):
        output, dropped = model(model.local(x))
        output.square().mean().backward()
        results.append((output.detach(), dropped))
    return results


@pytest.mark.ranks(4)
def test_every_replica_draws_its_own_and_its_ranks_alike(world: World) -> None:
    plain = network()
    x = torch.rand(8, 5, 3, generator=torch.Generator().manual_seed(3))

    def body(comm: AbstractCommunicator) -> list[tuple[torch.Tensor, torch.Tensor]]:
        def made() -> TiledModel:
            layout = simple_layout([0, 1], [2, 3])
            return tile(plain, comm, batch_size=8, sample=x, speeds="equal", layout=layout, reduction="mean", random="local")

        first = passes(made(), x, 3)
        comm.barrier()  # of threads, another rank's draws must not move the state that tile() takes over
        again = passes(made(), x, 3)
        for one, other in zip(first, again, strict=True):
            assert torch.equal(one[0], other[0])
            assert torch.equal(one[1], other[1])
        return first

    torch.manual_seed(5)
    state = torch.get_rng_state()
    told = world(body)
    if world.kind == "threads":
        assert torch.equal(torch.get_rng_state(), state)
    for one, other in ((0, 1), (2, 3)):
        for mine, theirs in zip(told[one], told[other], strict=True):
            torch.testing.assert_close(mine[0], theirs[0])
            assert torch.equal(mine[1], theirs[1])
    drawn = [mask for rank in (0, 2) for _, mask in told[rank]]  # three passes of two replicas: six masks
    assert all(not torch.equal(a, b) for i, a in enumerate(drawn) for b in drawn[:i])
    share = float(torch.cat(drawn).eq(0).double().mean())
    assert abs(share - P) < 0.15  # 360 draws: six standard deviations


def test_without_it_the_error_says_so() -> None:
    with pytest.raises(ModelError, match=r"random='local', with which every replica draws its own"):
        find_blocks(network(), sample=torch.rand(4, 5, 3))
    assert find_blocks(network(), sample=torch.rand(4, 5, 3), random="local").blocks


def test_random_draws_of_another_kind(comm: AbstractCommunicator) -> None:
    with pytest.raises(InputError, match="random must be 'plain' or 'local', not 'none'"):
        tile(network(), comm, batch_size=4, speeds="equal", random="none")  # type: ignore[arg-type]


class Variational(nn.Module):
    """A variational autoencoder, which draws in evaluation, too."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4))
        self.decoder = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 5))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean, log_variance = self.encoder(x).chunk(2, 1)
        seen = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        return self.decoder(seen), (mean.square() + log_variance.exp() - log_variance).sum(1)


@pytest.mark.ranks(2, 3)
def test_a_variational_autoencoder_is_refused_for_its_draws_and_trains_with_them(world: World) -> None:
    torch.manual_seed(1)
    plain, x = Variational().double(), torch.rand(6, 5, dtype=torch.float64)
    with pytest.raises(ModelError, match=r"the model itself\) \(Variational\) draws random numbers in training"):
        find_blocks(plain, sample=x)

    def body(comm: AbstractCommunicator) -> None:
        model = tile(
            plain, comm, batch_size=6, sample=x, speeds="equal", layout=simple_layout(range(comm.size)), reduction="mean",
            random="local",
        )  # fmt: skip
        assert len(model.found.blocks) == 2
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        output, divergence = model(model.local(x))
        (F.mse_loss(output, x) + divergence.mean()).backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            seen = model(model.local(x))
            assert not torch.equal(seen[0], output)
            told = [
                output,
                divergence,
                *seen,
                *(model.module.get_parameter(f"{name}.2.bias") for name in ("encoder", "decoder")),
            ]
            for other in comm.allgather_object([each.detach() for each in told]):
                for mine, theirs in zip(told, other, strict=True):
                    torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)

    world(body)


def test_a_network_that_draws_and_mixes_its_samples_is_still_told_apart() -> None:
    class Mixing(Variational):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return super().forward(x - x.mean(0))

    with pytest.raises(ModelError, match="depends on the other samples of the batch"):
        find_blocks(Mixing(), sample=torch.rand(6, 5), random="local")


def test_sparse_gradients_are_refused_by_name(comm: AbstractCommunicator) -> None:
    layout = simple_layout([0], [1])
    pair = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    table = nn.Parameter(torch.rand(5, 3))
    looked = Written(lambda net, x: net.pair(F.embedding(x, net.table, sparse=True)), table=table, pair=pair)
    model = tile(looked, comm, batch_size=4, speeds="equal", layout=layout, reduction="mean")
    loss = model(model.local(torch.arange(4))).mean()
    with pytest.raises(ModelError, match=r"the gradient of table is torch\.sparse_coo"):
        loss.backward()
