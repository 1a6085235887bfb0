"""DataParallel: gradients of the global batch on every rank, whatever the ranks have, use and leave out."""

import contextlib
import copy
import gc
import pickle
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from drawing import mlp
from tatami.comm import AbstractCommunicator, Recording, run_threads
from tatami.comm.overlap import AbstractOverlap, MessageOverlap, ScheduledOverlap, SharedOverlap, overlap
from tatami.comm.transport import Transport
from tatami.errors import CommTimeoutError, InputError, ModelError, RankDiedError, TrainingError
from tatami.gradients import loss_graph
from tatami.gradients.buckets import lay_buckets
from tatami.parallel import DataParallel
from tatami.testing.worlds import WORLD_TIMEOUT_S, World
from tiled_rig import simple_layout, tiled, whole_gradients

COUNTS = (3, 5, 2, 7)
"""Samples of each rank."""


Tensors = Sequence[torch.Tensor | None]
mse: Any = F.mse_loss  # as torch has no type for `backward`


class Network(nn.Module):
    """Two ways from input to output, of which one may be left out; a frozen layer, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 40)
        self.frozen = nn.Linear(40, 40).requires_grad_(False)
        self.norm = nn.BatchNorm1d(40)
        self.side = nn.Linear(4, 3)
        self.last = nn.Linear(40, 3)
        self.spare = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor, *, with_side: bool = True) -> torch.Tensor:
        hidden = torch.tanh(self.frozen(torch.relu(self.first(x))))
        result: torch.Tensor = self.last(hidden)
        return result + self.side(x) if with_side else result


def network(seed: int, dtype: torch.dtype = torch.float64) -> Network:
    generator = torch.Generator().manual_seed(seed)
    made = Network().to(dtype)
    with torch.no_grad():
        for tensor in (*made.parameters(), made.norm.running_mean):
            assert tensor is not None
            tensor.copy_(torch.randn(tensor.shape, generator=generator, dtype=torch.float64))
    return made


def batch(size: int, *, step: int = 0, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    """The global batch for `size` ranks."""
    generator = torch.Generator().manual_seed(100 + step)
    samples = sum(COUNTS[:size])
    x, y = (torch.randn(samples, n, generator=generator, dtype=torch.float64) for n in (4, 3))
    return x.to(dtype), y.to(dtype)


def local(comm: AbstractCommunicator, tensor: torch.Tensor) -> torch.Tensor:
    return torch.split(tensor, list(COUNTS[: comm.size]))[comm.rank]


def gradients(module: nn.Module) -> Tensors:
    return [None if parameter.grad is None else parameter.grad.clone() for parameter in module.parameters()]


def assert_same(actual: Tensors, expected: Tensors) -> None:
    assert [each is None for each in actual] == [each is None for each in expected]
    for one, other in zip(actual, expected, strict=True):
        if one is not None and other is not None:
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("algorithm", [None, "ring", "native"])
@pytest.mark.parametrize("bucket_bytes", [1, 400, 1 << 20])
def test_gradients_are_those_of_the_global_batch(comm: AbstractCommunicator, bucket_bytes: int, algorithm: str | None) -> None:
    model = DataParallel(network(comm.rank), comm, bucket_bytes=bucket_bytes, algorithm=algorithm)
    plain = network(0)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, plain)]
    for step in range(3):
        x, y = batch(comm.size, step=step)
        for each, inputs, targets in ((model, local(comm, x), local(comm, y)), (plain, x, y)):
            each.zero_grad(set_to_none=step != 1)
            mse(each(inputs), targets).backward()
        assert_same(gradients(model.module), gradients(plain))
        for optimizer in optimizers:
            optimizer.step()
    assert_same(list(model.module.parameters()), list(plain.parameters()))
    model.close()


def test_a_sum_over_samples_stays_a_sum_and_penalties_are_averaged(comm: AbstractCommunicator) -> None:
    x, y = batch(comm.size)
    plain, summed, penalised = network(0), network(0), network(0)
    total = DataParallel(summed, comm, reduction="sum")
    mse(total(local(comm, x)), local(comm, y), reduction="sum").backward()
    mse(plain(x), y, reduction="sum").backward()
    assert_same(gradients(summed), gradients(plain))

    plain.zero_grad()
    model = DataParallel(penalised, comm)
    (mse(model(local(comm, x)), local(comm, y)) + penalised.last.weight.square().sum()).backward()
    (mse(plain(x), y) + plain.last.weight.square().sum()).backward()
    assert_same(gradients(penalised), gradients(plain))
    for each in (total, model):
        each.close()


@pytest.mark.ranks(2)
@pytest.mark.threads_only  # one of them warns
def test_it_is_not_compiled_but_its_module_may_be(world: World) -> None:
    (x, y), plain = batch(world.size), network(0)
    mse(plain(x), y).backward()
    networks = [network(0) for _ in range(world.size)]
    loss: Any = torch.compile(mse, backend="aot_eager")
    loss(torch.ones(2, requires_grad=True), torch.ones(2))  # compiled by one thread

    def body(comm: AbstractCommunicator) -> None:
        model = DataParallel(networks[comm.rank], comm)
        with pytest.raises(ModelError, match=r"torch\.compile follows a tiled model, or DataParallel.* the module inside"):
            torch.compile(model, backend="eager")(local(comm, x))
        loss(model(local(comm, x)), local(comm, y)).backward()
        assert_same(gradients(model.module), gradients(plain))

    loss_graph._say_compiled.cache_clear()
    with pytest.warns(UserWarning, match="is compiled, and what it does with the samples is not seen"):
        world(body)


def test_a_mean_that_is_not_over_samples_is_refused_or_made_of_means_over_the_batch(comm: AbstractCommunicator) -> None:
    x, y = batch(comm.size)
    weights = torch.tensor([1.0, 2.0, 0.3], dtype=torch.float64)
    (here, target), plain, model = (local(comm, x), local(comm, y)), network(0), DataParallel(network(0), comm)
    with pytest.raises(InputError, match="after a forward pass"):
        model.over_batch(x.mean())
    for loss in (
        lambda output: mse(output, target).sqrt(),
        lambda output: F.cross_entropy(output, target.argmax(1), weight=weights),
        lambda output: F.cross_entropy(
            output, target.argmax(1).where(torch.arange(len(target)) > 0, -100), label_smoothing=0.1
        ),
    ):
        with pytest.raises(InputError, match=r"the loss .*model\.over_batch") if comm.size > 1 else contextlib.nullcontext():
            loss(model(here)).backward()

    def exact(output: torch.Tensor, target: torch.Tensor, over: Any) -> Any:
        mask = (target[:, 0] > -1).double()
        spread = over((output - over(output.mean(0))).square().mean())
        return over(mse(output, target)).sqrt() + over((output.square().sum(1) * mask).mean()) / over(mask.mean()) + spread

    model.zero_grad()
    value, expected = exact(model(here), target, model.over_batch), exact(plain(x), y, lambda mean: mean)
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)
    value.backward()
    expected.backward()
    assert_same(gradients(model.module), gradients(plain))
    for copied in (copy.deepcopy, pickle.dumps, torch.optim.swa_utils.AveragedModel):
        with pytest.raises(ModelError, match=r"cannot be copied or pickled.*AveragedModel\(model\.module\)"):
            copied(model)
    assert_same(list(torch.optim.swa_utils.AveragedModel(model.module).module.parameters()), list(plain.parameters()))
    model.close()


class ColumnsFirst(nn.Linear):
    """Gives (columns, samples)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).T


class Repeated(ColumnsFirst):
    """Gives (2 columns, samples)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).repeat(2, 1)


WITHIN: dict[str, tuple[type[nn.Linear], Any]] = {
    "pairs of columns": (nn.Linear, lambda out: F.softplus(out[:, :, None] - out[:, None]).mean()),
    "products": (nn.Linear, lambda out: torch.bmm(out[:, None], out.exp()[..., None]).square().mean()),
    "one by one": (nn.Linear, lambda out: torch.stack([row.logsumexp(0) for row in out]).mean() + out[:, 1:].square().mean()),
    "rolled": (nn.Linear, lambda out: F.mse_loss(out.sort(1).values, out.roll(1, 1)) + out.std(1).mean()),
    "more columns first": (Repeated, lambda out: out[1:].square().mean() + out.mean(0).exp().mean() + out.std(0).mean()),
    "columns first": (ColumnsFirst, lambda out: out[1:].square().mean() + out.mean(0).exp().mean() + out.std(0).mean()),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", WITHIN)
def test_losses_within_samples_are_exact_where_sizes_do_not_tell_samples_from_columns(
    comm: AbstractCommunicator, name: str
) -> None:
    kind, loss = WITHIN[name]
    generator = torch.Generator().manual_seed(3)
    plain, (x, weights) = kind(4, 3, dtype=torch.float64), torch.randn(2, 6, 4, generator=generator, dtype=torch.float64)
    plain.load_state_dict({"weight": weights[:3], "bias": weights[3, :3]})
    model = DataParallel(copy.deepcopy(plain), comm)
    loss(model(x[3 * comm.rank : 3 * comm.rank + 3])).backward()
    loss(plain(x)).backward()
    assert_same(gradients(model.module), gradients(plain))
    model.close()


class Bags(nn.EmbeddingBag):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(tokens, torch.arange(3))


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("network", "shape", "match"),
    [
        (nn.Linear(4, 3), (7, 2, 4), "takes a mean over so many numbers for each row of what the model is given"),
        (Bags(9, 7), (4,), "takes rows of an output for each row of the first tensor of the model's input"),
    ],
)
def test_samples_that_are_not_the_first_axis_of_the_input_are_found(
    comm: AbstractCommunicator, network: nn.Module, shape: tuple[int, ...], match: str
) -> None:
    """Time first, and tokens of several samples in one row: ranks would be weighed by their steps or tokens."""
    model = DataParallel(copy.deepcopy(network), comm)
    rows = torch.ones(*(size + comm.rank * (axis == min(1, len(shape) - 1)) for axis, size in enumerate(shape)))
    given = rows if isinstance(network, nn.Linear) else rows.long()
    model(given).square().mean().backward()
    with pytest.raises(InputError, match=match):
        model(given)


class Kept(nn.Linear):
    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return super().forward(x - self.mean)


@pytest.mark.ranks(2)
@pytest.mark.threads_only  # rank 0 warns
def test_buffers_that_ranks_change_by_their_own_samples_are_warned_about(world: World) -> None:
    networks = [Kept() for _ in range(world.size)]

    def body(comm: AbstractCommunicator) -> None:
        model = DataParallel(networks[comm.rank], comm)
        for _ in range(3):
            model(torch.full((2, 4), 1.0 + comm.rank)).square().mean().backward()

    with pytest.warns(UserWarning, match="the buffer mean is not the same on all ranks: 0.1 on rank 0, 0.2 on rank 1"):
        world(body)


class Similarities(nn.Linear):
    """Gives (samples, samples)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) @ x[:, :3].T


@pytest.mark.ranks(2)
def test_similarities_of_all_samples_that_are_compared_both_ways_are_refused(comm: AbstractCommunicator) -> None:
    model = DataParallel(Similarities(4, 3, dtype=torch.float64), comm)
    similar, own = model(torch.eye(4, dtype=torch.float64)[: 4 - comm.rank]), torch.arange(4 - comm.rank)
    with pytest.raises(InputError, match="takes LogSoftmax of numbers of several samples"):
        torch.autograd.backward(F.cross_entropy(similar, own) + F.cross_entropy(similar.T, own))
    model.close()


def test_accumulation_over_micro_batches(comm: AbstractCommunicator) -> None:
    comm = Recording(comm)
    model, plain = DataParallel(network(0), comm), network(0)
    for _ in range(2):
        model.zero_grad()
        plain.zero_grad()
        for step in range(3):
            x, y = batch(comm.size, step=step)
            # Ranks' shares differ from one micro-batch to the next.
            mine = local(comm, x), local(comm, y)
            if comm.rank == 0 and step == 1:
                mine = mine[0][:2], mine[1][:2]
                x, y = x[torch.arange(len(x)) != 2], y[torch.arange(len(y)) != 2]
            elif step == 1:
                x, y = x[torch.arange(len(x)) != 2], y[torch.arange(len(y)) != 2]
            with model.no_sync() if step < 2 else contextlib.nullcontext():
                mse(model(mine[0], with_side=step != 2), mine[1]).backward()
            mse(plain(x, with_side=step != 2), y).backward()
        assert_same(gradients(model.module), gradients(plain))
    model.close()


def test_what_only_some_ranks_use_and_what_nobody_uses(comm: AbstractCommunicator) -> None:
    own, plain = network(0), network(0)
    model = DataParallel(own, comm)
    for _ in range(2):
        model.zero_grad()
        x, y = batch(comm.size)
        uses_side = comm.rank == comm.size - 1
        mse(model(local(comm, x), with_side=uses_side), local(comm, y)).backward()

        plain.zero_grad()
        parts = torch.split(x, list(COUNTS[: comm.size]))
        outputs = [plain(part, with_side=rank == comm.size - 1) for rank, part in enumerate(parts)]
        mse(torch.cat(outputs), y).backward()
        assert_same(gradients(model.module), gradients(plain))
        assert own.spare.weight.grad is None
        assert own.frozen.weight.grad is None
    model.close()


@pytest.mark.parametrize(("wire", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float16, 2e-3), (torch.float32, 1e-6)])
@pytest.mark.parametrize("algorithm", [None, "ring"])
def test_gradients_that_travel_narrower(world: World, wire: torch.dtype, tolerance: float, algorithm: str | None) -> None:
    """Tolerance relative to the largest element: a few units in the last place of the wire's dtype."""

    def body(comm: AbstractCommunicator) -> list[float]:
        model, plain = DataParallel(network(0), comm, wire=wire, algorithm=algorithm), network(0)
        x, y = batch(comm.size)
        for _ in range(2):
            model.zero_grad()
            mse(model(local(comm, x)), local(comm, y)).backward()
        mse(plain(x), y).backward()
        for one, other in zip(gradients(model.module), gradients(plain), strict=True):
            assert (one is None) == (other is None)
            if one is not None and other is not None:
                assert one.dtype == torch.float64
                torch.testing.assert_close(one, other, rtol=0, atol=tolerance * float(other.abs().max()))
        values = [value for each in gradients(model.module) if each is not None for value in each.flatten().tolist()]
        model.close()
        return values

    given = world(body)
    assert all(each == given[0] for each in given)


def test_double_buffering_is_exactly_one_step_stale(comm: AbstractCommunicator) -> None:
    model, plain = DataParallel(network(0), comm, double_buffering=True), network(0)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
    late: Tensors = [None for _ in plain.parameters()]
    for step in range(5):
        x, y = batch(comm.size, step=step)
        for each, inputs, targets in ((model, local(comm, x), local(comm, y)), (plain, x, y)):
            each.zero_grad()
            mse(each(inputs), targets).backward()
        fresh = gradients(plain)
        for parameter, grad in zip(plain.parameters(), late, strict=True):
            parameter.grad = grad
        late = fresh
        assert_same(gradients(model.module), gradients(plain))
        for optimizer in optimizers:
            optimizer.step()
        assert_same(list(model.module.parameters()), list(plain.parameters()))
    model.flush()
    assert_same(gradients(model.module), late)
    model.close()


def test_weights_and_buffers_of_rank_0_are_everyones(comm: AbstractCommunicator) -> None:
    mine = network(comm.rank)
    assert mine.norm.num_batches_tracked is not None
    mine.norm.num_batches_tracked.add_(comm.rank)
    model = DataParallel(mine, comm)
    for name, tensor in network(0).state_dict().items():
        assert torch.equal(mine.state_dict()[name], tensor), name
    assert list(model.state_dict()) == [f"module.{name}" for name in mine.state_dict()]
    model.close()


def test_outputs_may_be_nested_and_used_inside(comm: AbstractCommunicator) -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = network(0)

        def forward(self, *, x: torch.Tensor) -> dict[str, object]:
            hidden = self.inner(x)
            return {"hidden": hidden, "more": [(hidden * 2).sin(), None]}

    def loss(output: dict[str, object], y: torch.Tensor) -> Any:
        hidden, more = output["hidden"], output["more"]
        assert isinstance(hidden, torch.Tensor)
        assert isinstance(more, list)
        hidden += 1  # outputs may be changed in place
        return mse(hidden, y) + mse(more[0], y)

    x, y = batch(comm.size)
    plain, own = Nested(), Nested()
    model = DataParallel(own, comm)
    loss(model(x=local(comm, x)), local(comm, y)).backward()
    loss(plain(x=x), y).backward()
    assert_same(gradients(own), gradients(plain))
    model.close()


def test_forward_without_gradients_talks_to_nobody(comm: AbstractCommunicator) -> None:
    model = DataParallel(network(0), comm)
    if comm.rank == 0:
        with torch.no_grad():
            model(batch(1)[0])
    x, y = batch(comm.size)
    mse(model(local(comm, x)), local(comm, y)).backward()
    model.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["shared", "two hosts", "a host each", "messages", "scheduled"])
def test_means_of_several_vectors(comm: AbstractCommunicator, kind: str, dtype: torch.dtype) -> None:
    sizes = [3, 0, 5000, 1]
    hosts = {
        "shared": [""] * comm.size,
        "two hosts": [str(rank % max(1, comm.size // 2)) for rank in range(comm.size)],
        "a host each": [str(rank) for rank in range(comm.size)],
    }
    if kind in hosts and not comm.has_windows:
        return
    sums: AbstractOverlap
    if kind in hosts:
        sums = SharedOverlap(comm, sizes=sizes, dtype=dtype, hosts=hosts[kind])
    elif kind == "messages":
        sums = overlap(comm, sizes=sizes, dtype=dtype, hosts=hosts["a host each"])
    else:
        sums = ScheduledOverlap(comm, sizes=sizes, dtype=dtype, algorithm="ring")
    for turn in range(3):
        order = [(index + turn + comm.rank) % len(sizes) for index in range(len(sizes))]
        for index in order:
            sums.vectors[index].fill_(float(comm.rank + index + turn))
            sums.begin(index)
            sums.progress()
        sums.wait()
        for index, vector in enumerate(sums.vectors):
            expected = torch.full((sizes[index],), float(sum(rank + index + turn for rank in range(comm.size)))).to(dtype)
            assert torch.equal(vector, expected)
    sums.close()


def test_ranks_of_one_host_share_their_buckets_and_send_nothing(comm: AbstractCommunicator) -> None:
    sums = overlap(comm, sizes=[100])
    assert isinstance(sums, SharedOverlap if comm.has_windows else MessageOverlap)
    sums.close()


def test_ranks_whose_vectors_do_not_fit_into_shared_memory_send_messages(
    comm: AbstractCommunicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container has 64 MiB by default, and a rank that writes beyond the end is killed by a bus error."""
    monkeypatch.setattr("tatami.comm.overlap.shutil.disk_usage", lambda _: SimpleNamespace(free=2 * 400 * comm.size - 1))
    sums = overlap(comm, sizes=[100])
    sums.vectors[0].fill_(1.0)
    sums.begin(0)
    sums.wait()
    assert isinstance(sums, MessageOverlap)
    assert torch.equal(sums.vectors[0], torch.full((100,), float(comm.size)))
    sums.close()


def test_a_window_that_is_forgotten_gives_its_memory_back(comm: AbstractCommunicator) -> None:
    sums = overlap(comm, sizes=[3 * 4096])
    vector = sums.vectors[0].fill_(1.0)
    del sums
    gc.collect()
    if comm.transport is Transport.MPI:  # what the system takes back is read as zeros
        assert not vector.any()


@pytest.mark.ranks(2, 3, 4)
def test_hosts_whose_number_is_no_power_of_two_send_no_vector_twice(comm: AbstractCommunicator) -> None:
    sums = overlap(comm, sizes=[3000], hosts=[str(rank) for rank in range(comm.size)])
    assert isinstance(sums, MessageOverlap)
    assert sums.sums.is_direct == (comm.size == 3)
    sums.close()


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("hosts", "shared"), [("abab", True), ("aabb", True), ("aaab", False), ("abcd", False)])
def test_hosts_of_equally_many_ranks_send_slices_only(comm: AbstractCommunicator, hosts: str, shared: bool) -> None:
    sums = overlap(comm, sizes=[100], hosts=list(hosts))
    assert isinstance(sums, SharedOverlap if shared and comm.has_windows else MessageOverlap)
    sums.close()


@pytest.mark.threads_only
@pytest.mark.ranks(4)
def test_a_rank_that_does_not_begin_is_named_across_hosts(comm: AbstractCommunicator) -> None:
    told = {
        0: "all-reduce of a slice across hosts on rank 0 of 4 .*rank 2",
        1: "all-reduce of a slice across hosts on rank 1 of 4 .*rank 3",
        2: "shared all-reduce on rank 2 of 4 .*rank 3",
    }
    sums = SharedOverlap(comm, sizes=[100], dtype=torch.float32, hosts=list("aabb"))
    if comm.rank != 3:
        sums.begin(0)
    comm.barrier()  # all others have begun
    if comm.rank != 3:
        comm.timeout_s = 1.0
        with pytest.raises(CommTimeoutError, match=told[comm.rank]):
            sums.wait()
        comm.timeout_s = WORLD_TIMEOUT_S
    comm.barrier()


@pytest.mark.ranks(2, 3)
def test_networks_that_differ_are_told_apart(comm: AbstractCommunicator) -> None:
    def half_frozen() -> nn.Module:
        linear = nn.Linear(3, 2)
        linear.weight.requires_grad_(False)
        return linear

    with pytest.raises(InputError, match=r"DataParallel: rank 0 has weight \(2, 3\) float32, rank 1 has weight \(2, 4\)"):
        DataParallel(nn.Linear(4 if comm.rank == 1 else 3, 2), comm)
    with pytest.raises(InputError, match=r"rank 0 has weight \(2, 3\) float32, rank 1 has .* frozen"):
        DataParallel(nn.Linear(3, 2).requires_grad_(comm.rank != 1) if comm.rank != 1 else half_frozen(), comm)


def penalised(model: Any, x: torch.Tensor, reduction: str) -> Any:
    """A loss with a penalty on the gradient by the inputs."""
    over: Any = torch.mean if reduction == "mean" else torch.sum
    x = x.clone().requires_grad_()
    out = model(x)
    (by_inputs,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return over(out.square()) + over(by_inputs.square().sum(1))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_gradient_penalty_is_exact_whatever_the_shares(comm: AbstractCommunicator, reduction: Any) -> None:
    x, _ = batch(comm.size)
    plain, module = network(0), network(0)
    penalised(plain, x, reduction).backward()
    model = DataParallel(module, comm, reduction=reduction)
    penalised(model, local(comm, x), reduction).backward()
    assert_same(gradients(module), gradients(plain))
    with pytest.raises(InputError, match="create_graph=True: the gradients of parameters are summed over the replicas"):
        getattr(model(local(comm, x)).square(), reduction)().backward(create_graph=True)
    model.close()


@pytest.mark.ranks(2)
def test_a_penalty_in_a_sum_is_refused(comm: AbstractCommunicator) -> None:
    module = network(0)
    model = DataParallel(module, comm, reduction="sum")
    loss = model(local(comm, batch(comm.size)[0])).sum() + module.last.weight.norm()
    with pytest.raises(InputError, match=r"the loss reads last\.weight outside .* is a sum over samples"):
        loss.backward()
    model.close()


def test_gradients_that_would_be_of_one_rank_alone_are_refused(comm: AbstractCommunicator) -> None:
    module = network(0)
    model = DataParallel(module, comm)
    x = local(comm, batch(comm.size)[0]).requires_grad_()
    for wanted in (list(module.last.parameters()), [x, module.side.weight]):
        with pytest.raises(InputError, match=r"torch\.autograd\.grad was asked for the gradient of (side|last)\."):
            torch.autograd.grad(model(x).square().mean(), wanted)
    (by_inputs,) = torch.autograd.grad(model(x).square().mean(), x)
    assert by_inputs.shape == x.shape
    last = list(module.last.parameters())
    model(x).square().mean().backward(inputs=last)
    plain = network(0)
    plain(batch(comm.size)[0]).square().mean().backward()
    assert_same([each.grad for each in last], [each.grad for each in plain.last.parameters()])
    model.close()


@pytest.mark.ranks(1, 2)
def test_what_cannot_be_is_refused(comm: AbstractCommunicator) -> None:
    with pytest.raises(InputError, match=r"wire=torch.int64 is not a floating dtype"):
        DataParallel(network(0), comm, wire=torch.int64)
    with pytest.raises(InputError, match="nothing to train"):
        DataParallel(network(0).requires_grad_(False), comm)
    with pytest.raises(InputError, match=r"layer 0 \(Embedding\) divides gradients by how often its samples look up a row"):
        DataParallel(nn.Sequential(nn.Embedding(5, 3, scale_grad_by_freq=True)), comm)
    if comm.size > 1 and not torch.distributed.is_initialized():
        with pytest.raises(ModelError, match=r"1 is a SyncBatchNorm, which takes statistics of this rank's samples alone"):
            DataParallel(nn.Sequential(nn.Linear(3, 4), nn.SyncBatchNorm(4)), comm)
    with pytest.raises(InputError, match="bucket_bytes must be at least 1, not 0"):
        DataParallel(network(0), comm, bucket_bytes=0)
    module = network(0)
    model = DataParallel(module, comm)
    with pytest.raises(InputError, match="this network is in another DataParallel"):
        DataParallel(module, comm)
    model.close()
    DataParallel(module, comm).close()


def test_mistakes_in_forward_are_told() -> None:
    class Opaque(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 1)

        def forward(self, x: object) -> object:
            return {1, 2} if isinstance(x, torch.Tensor) else self.linear(torch.ones(2, 4))

    def body(comm: AbstractCommunicator) -> None:
        opaque = DataParallel(Opaque(), comm)
        with pytest.raises(InputError, match="output of Opaque, set, holds no tensor that needs gradients"):
            opaque(torch.ones(2, 4))
        if comm.size > 1:
            with pytest.raises(InputError, match="none of the arguments is a tensor"):
                opaque(5)

    for size in (1, 2):
        run_threads(body, size=size)


@pytest.mark.parametrize("double_buffering", [False, True])
def test_what_is_thawed_in_mid_run_is_summed_or_refused(comm: AbstractCommunicator, double_buffering: bool) -> None:
    module, plain = network(0), network(0)
    model = DataParallel(module, comm, double_buffering=double_buffering)
    x, y = batch(comm.size)
    for step in range(5):
        if step == 3:
            for network_ in (module, plain):
                network_.frozen.requires_grad_(True)
                network_.first.requires_grad_(False)
            if double_buffering:
                with pytest.raises(InputError, match=r"a parameter is trained that was frozen .* call flush\(\)"):
                    model(local(comm, x))
                break
        both: list[tuple[Any, torch.Tensor, torch.Tensor]] = [(model, local(comm, x), local(comm, y)), (plain, x, y)]
        for each, inputs, targets in both:
            each.zero_grad()
            mse(each(inputs), targets).backward()
        if not double_buffering:
            assert_same(gradients(module), gradients(plain))
    model.close()


@pytest.mark.ranks(2)
@pytest.mark.threads_only
def test_a_backward_pass_that_was_broken_off_is_not_gone_on_from_where_sums_have_begun(comm: AbstractCommunicator) -> None:
    def boom(_: torch.Tensor) -> None:
        raise KeyError("boom")

    class Fragile(nn.Sequential):
        fails = False

        def forward(self, x: torch.Tensor) -> Any:
            hidden = self[0](x)
            if self.fails:
                hidden.register_hook(boom)
            return self[1](hidden)

    module = Fragile(nn.Linear(4, 8), nn.Linear(8, 3)).double()
    model = DataParallel(module, comm, bucket_bytes=8)
    x, y = batch(comm.size)
    for step in range(5):
        module.fails = step in (1, 4)
        if module.fails:
            with pytest.raises(KeyError, match="boom"):
                mse(model(local(comm, x)), local(comm, y)).backward()
            continue
        mse(model(local(comm, x)), local(comm, y)).backward()  # after the first, in which nothing had been sent
    with pytest.raises(TrainingError, match=f"the last backward pass on rank {comm.rank} was broken off"):
        model(local(comm, x))


@pytest.mark.parametrize("algorithm", [None, "ring"])
def test_a_rank_that_raises_ends_the_others(algorithm: str | None) -> None:
    class Fragile(Network):
        fails = False

        def forward(self, x: torch.Tensor, *, with_side: bool = True) -> torch.Tensor:
            if self.fails:
                raise KeyError("boom")
            return super().forward(x, with_side=with_side)

    ended: list[int] = []

    def body(comm: AbstractCommunicator) -> None:
        module = Fragile()
        model = DataParallel(module, comm, algorithm=algorithm)
        x, y = torch.ones(2, 4), torch.ones(2, 3)
        try:
            mse(model(x), y).backward()  # which others may still be in when rank 1 raises
            module.fails = comm.rank == 1
            mse(model(x), y).backward()
        except RankDiedError:
            ended.append(comm.rank)
            raise

    with pytest.raises(KeyError, match="boom"):
        run_threads(body, size=3)
    assert sorted(ended) == [0, 2]


@pytest.mark.ranks(2)
def test_a_rank_that_does_not_come_is_named(comm: AbstractCommunicator) -> None:
    if not comm.has_windows:
        return
    sums = SharedOverlap(comm, sizes=[10], dtype=torch.float32)
    if comm.rank == 0:
        sums.begin(0)
        comm.timeout_s = 0.1
        with pytest.raises(CommTimeoutError, match=r"shared all-reduce on rank 0 of 2 timed out .*: rank 1 did not join"):
            sums.wait()
        comm.timeout_s = WORLD_TIMEOUT_S
    comm.barrier()


def test_buckets_follow_backward_and_the_first_is_small() -> None:
    sizes = [100, 300_000, 7, 200_000, 200_000]
    parameters = [nn.Parameter(torch.empty(size)) for size in sizes]
    layouts = lay_buckets(parameters, bucket_bytes=1 << 20, first_bytes=1 << 19)
    assert [layout.parameters for layout in layouts] == [(4,), (3, 2), (1,), (0,)]
    assert [layout.size for layout in layouts] == [200_001, 200_009, 300_001, 101]
    assert layouts[1].starts == (0, 200_000, 200_007)
    mixed = [nn.Parameter(torch.empty(2, dtype=dtype)) for dtype in (torch.float32, torch.float64, torch.float64)]
    assert [layout.dtype for layout in lay_buckets(mixed)] == [torch.float64, torch.float32]


@pytest.mark.ranks(4)
def test_replicas_of_a_tiled_network(comm: AbstractCommunicator) -> None:
    """Two replicas, each tiled over two ranks: tensor-parallel sums inside a replica, DataParallel between replicas."""

    build = partial(mlp, 4, 10, 3, seed=3)
    replica, tile_ranks = comm.split(comm.rank // 2), comm.split(comm.rank % 2)
    assert replica is not None
    assert tile_ranks is not None
    generator = torch.Generator().manual_seed(5)
    x, y = (torch.randn(8, n, generator=generator, dtype=torch.float64) for n in (4, 3))
    half = slice(0, 4) if comm.rank < 2 else slice(4, 8)
    for layout in (simple_layout([0], [1]), simple_layout([0, 1])):
        tiled_part = tiled(build(), replica, layout=layout, batch_size=4)
        comm.barrier()  # torch.fx patches every module of the process while one replica is traced
        model = DataParallel(tiled_part, tile_ranks)
        mine_x, mine_y = tiled_part.local(x[half], y[half])
        mse(model(mine_x), mine_y).backward()
        plain = build()
        mse(plain(x), y).backward()
        whole = whole_gradients(tiled_part)
        for name, parameter in plain.named_parameters():
            grad = whole[name]
            assert grad is not None
            assert parameter.grad is not None
            torch.testing.assert_close(grad, parameter.grad, rtol=1e-12, atol=1e-12)
        model.close()
