"""An optimizer on many ranks does what one process does with all samples; the first step counts, and layers may come later."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tatami.comm import AbstractCommunicator, Recording
from tatami.errors import CommTimeoutError, InputError, NotFiniteError
from tatami.parallel import MultiNodeOptimizer, average_buffers, average_gradients, broadcast_model, create_mnbn_model

COUNTS = (3, 5, 2, 7)
mse: Any = F.mse_loss


def network(seed: int, dtype: torch.dtype = torch.float64) -> Any:
    made = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3)).to(dtype)
    made[1].eval()  # its statistics would be those of each rank's own samples
    return filled(made, seed)


def filled(module: Any, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in (*module.parameters(), *(each for each in module.buffers() if each.is_floating_point())):
            tensor.copy_(torch.rand(tensor.shape, generator=generator, dtype=torch.float64))
    return module


def batch(counts: tuple[int, ...], *, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    x, y = (torch.randn(sum(counts), n, generator=generator, dtype=torch.float64) for n in (4, 3))
    return x, y


def assert_same(actual: nn.Module, expected: nn.Module, *, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(actual.state_dict(), expected.state_dict(), rtol=tolerance, atol=tolerance)


MAKERS = pytest.mark.parametrize(
    "make",
    [
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01),
        lambda parameters: torch.optim.AdamW(parameters, lr=0.05),
    ],
    ids=["sgd", "adamw"],
)


@MAKERS
@pytest.mark.parametrize("bucket_bytes", [40, 1 << 20])
def test_every_step_is_that_of_one_process_also_the_first(comm: AbstractCommunicator, make: Any, bucket_bytes: int) -> None:
    counts = (4,) * comm.size
    model, plain = network(comm.rank), network(0)
    optimizer = MultiNodeOptimizer(make(model.parameters()), comm, model=model, bucket_bytes=bucket_bytes)
    single = make(plain.parameters())
    assert_same(model, plain, tolerance=0)
    schedules = [torch.optim.lr_scheduler.StepLR(each, 2, gamma=0.5) for each in (optimizer, single)]
    for step in range(4):
        x, y = batch(counts, step=step)
        optimizer.zero_grad(set_to_none=step != 2)
        single.zero_grad()
        mse(model(x[4 * comm.rank : 4 * comm.rank + 4]), y[4 * comm.rank : 4 * comm.rank + 4]).backward()
        mse(plain(x), y).backward()
        optimizer.step()
        single.step()
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=1e-12)
        for schedule in schedules:
            schedule.step()
        assert_same(model, plain)
    assert schedules[0].get_last_lr() == schedules[1].get_last_lr() == [single.defaults["lr"] / 4]
    optimizer.close()


def test_ranks_weigh_by_their_samples_and_one_may_have_none(comm: AbstractCommunicator) -> None:
    counts = (0, *COUNTS[1 : comm.size]) if comm.size > 1 else (3,)
    model, plain = network(0), network(0)
    optimizer = MultiNodeOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), comm, weighted=True)
    single = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(2):
        x, y = batch(counts, step=step)
        mine = [torch.split(each, list(counts))[comm.rank] for each in (x, y)]
        mse(model(mine[0]), mine[1]).backward()  # of no samples: NaN
        mse(plain(x), y).backward()
        optimizer.step(num_samples=counts[comm.rank])
        single.step()
        assert_same(model, plain)
        optimizer.zero_grad()
        single.zero_grad()
    with pytest.raises(InputError, match="weighted=True, but num_samples=None"):
        optimizer.step()
    optimizer.close()


def test_an_optimizer_that_evaluates_the_loss_itself_decides_alike_on_all_ranks(comm: AbstractCommunicator) -> None:
    counts = COUNTS[: comm.size]
    model, plain = network(0), network(0)
    optimizer = MultiNodeOptimizer(
        torch.optim.LBFGS(model.parameters(), max_iter=5, line_search_fn="strong_wolfe"), comm, weighted=True
    )
    single = torch.optim.LBFGS(plain.parameters(), max_iter=5, line_search_fn="strong_wolfe")
    x, y = batch(counts, step=0)
    mine = [torch.split(each, list(counts))[comm.rank] for each in (x, y)]

    def closure(net: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> Any:
        net.zero_grad()
        loss = mse(net(inputs), targets)
        loss.backward()
        return loss

    for _ in range(2):
        ours = optimizer.step(lambda: closure(model, *mine), num_samples=counts[comm.rank])
        theirs: Any = single.step(lambda: closure(plain, x, y))  # type: ignore[no-untyped-call]
        assert ours == pytest.approx(float(theirs), rel=1e-9)
    assert_same(model, plain, tolerance=1e-7)
    optimizer.close()


@pytest.mark.parametrize("double_buffering", [False, True])
def test_a_layer_added_later_is_that_of_rank_0_and_in_the_next_step(comm: AbstractCommunicator, double_buffering: bool) -> None:
    model, plain = network(0), network(0)
    optimizer = MultiNodeOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), comm, double_buffering=double_buffering)
    single = torch.optim.SGD(plain.parameters(), lr=0.1)
    pending = None
    for step in range(4):
        if step == 2:
            model.append(filled(nn.Linear(3, 3, dtype=torch.float64), comm.rank))
            plain.append(filled(nn.Linear(3, 3, dtype=torch.float64), 0))
            optimizer.add_param_group({"params": model[4].parameters(), "lr": 0.02})
            single.add_param_group({"params": plain[4].parameters(), "lr": 0.02})
            assert_same(model, plain)
        x, y = batch((2,) * comm.size, step=step)
        optimizer.zero_grad()
        single.zero_grad()
        mse(model(x[comm.rank :: comm.size]), y[comm.rank :: comm.size]).backward()
        mse(plain(x), y).backward()
        optimizer.step()
        now = [None if each.grad is None else each.grad.clone() for each in plain.parameters()]
        if double_buffering:
            earlier = [*(pending or []), *[None] * (len(now) - len(pending or []))]
            pending = now
            for each, grad in zip(plain.parameters(), earlier, strict=True):
                each.grad = grad
        single.step()
        assert_same(model, plain)
    if double_buffering:
        optimizer.flush()
        for each, grad in zip(plain.parameters(), pending or [], strict=True):
            each.grad = grad
        single.step()
        assert_same(model, plain)
    optimizer.close()


def test_gradients_that_only_some_ranks_have_and_that_nobody_has(comm: AbstractCommunicator) -> None:
    some, nobody = (nn.Parameter(torch.ones(2, dtype=torch.float64)) for _ in range(2))
    optimizer = MultiNodeOptimizer(torch.optim.SGD([some, nobody], lr=1.0, weight_decay=0.5), comm)
    for _ in range(2):
        optimizer.zero_grad()
        if comm.rank % 2:
            some.grad = torch.full((2,), comm.rank, dtype=torch.float64)
        optimizer.step()
    expected = sum(rank for rank in range(comm.size) if rank % 2) / comm.size
    if comm.size > 1:
        assert some.grad is not None
        assert some.grad.tolist() == pytest.approx([expected] * 2, rel=1e-15)
    assert nobody.grad is None
    assert nobody.tolist() == [1.0, 1.0]
    optimizer.close()


@pytest.mark.parametrize(("wire", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
def test_gradients_that_travel_narrower(comm: AbstractCommunicator, wire: torch.dtype, tolerance: float) -> None:
    weight = nn.Parameter(torch.zeros(50))
    optimizer = MultiNodeOptimizer(torch.optim.SGD([weight], lr=1.0), comm, wire=wire)
    weight.grad = torch.linspace(-1, 1, 50) + comm.rank
    optimizer.step()
    assert weight.grad.dtype == torch.float32
    torch.testing.assert_close(
        -weight.detach(), torch.linspace(-1, 1, 50) + (comm.size - 1) / 2, rtol=tolerance, atol=tolerance
    )
    optimizer.close()


@MAKERS
def test_its_state_is_that_of_the_plain_optimizer(comm: AbstractCommunicator, make: Any) -> None:
    model, other = network(0), network(0)
    optimizer = MultiNodeOptimizer(make(model.parameters()), comm)
    mse(model(torch.ones(2, 4, dtype=torch.float64)), torch.zeros(2, 3, dtype=torch.float64)).backward()
    optimizer.step()
    plain = make(other.parameters())
    plain.load_state_dict(optimizer.state_dict())
    assert plain.state_dict()["state"].keys() == optimizer.state_dict()["state"].keys() != set()
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.load_state_dict(plain.state_dict())
    assert optimizer.param_groups[0]["lr"] == optimizer.optimizer.param_groups[0]["lr"] == plain.defaults["lr"]
    assert optimizer.state is optimizer.optimizer.state
    assert repr(optimizer).startswith("MultiNodeOptimizer(" + type(plain).__name__)
    called = []
    optimizer.register_step_pre_hook(lambda *_: called.append(1))
    optimizer.step()
    assert called == [1]
    optimizer.close()


@pytest.mark.ranks(2, 3)
def test_what_can_not_be_is_told_on_all_ranks(comm: AbstractCommunicator) -> None:
    model = nn.Sequential(nn.Linear(2, 2 + comm.rank))
    with pytest.raises(InputError, match=r"rank 0 has 0.weight \(2, 2\) float32, rank 1 has 0.weight \(3, 2\) float32"):
        MultiNodeOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), comm, model=model)
    lazy = nn.LazyLinear(3)
    with pytest.raises(InputError, match="weight belongs to a lazy layer and has no shape yet; run one forward pass"):
        MultiNodeOptimizer(torch.optim.SGD(lazy.parameters(), lr=1.0), comm, model=lazy)
    with pytest.raises(InputError, match="average_gradients: weight belongs to a lazy layer and has no shape yet; run one"):
        average_gradients(lazy, comm)
    with pytest.raises(InputError, match=r"wire=torch\.int32 is not a floating dtype; choose torch\.bfloat16"):
        MultiNodeOptimizer(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0), comm, wire=torch.int32)
    weight = nn.Parameter(torch.zeros(2))
    for name, values in {
        "wire": (None, torch.bfloat16), "double_buffering": (False, True), "weighted": (False, True), "bucket_bytes": (64, 8),
    }.items():  # fmt: skip
        options: Any = {name: values[comm.rank > 0]}
        with pytest.raises(InputError, match=f"rank 0 has {name} {values[0]}, rank 1 has {name} {values[1]}"):
            MultiNodeOptimizer(torch.optim.SGD([weight], lr=1.0), comm, **options)
    with pytest.raises(InputError, match="rank 0 has optimizer SGD, rank 1 has optimizer Adam"):
        MultiNodeOptimizer((torch.optim.SGD if comm.rank == 0 else torch.optim.Adam)([weight], lr=1.0), comm)
    optimizer = MultiNodeOptimizer(torch.optim.SGD([weight], lr=1.0), comm)
    weight.grad = torch.ones(2).to_sparse()
    with pytest.raises(InputError, match=r"the gradient of parameter 0 is torch\.sparse_coo"):
        optimizer.step()
    weight.grad = None
    with pytest.raises(InputError, match="weighted=False, but num_samples=3"):
        optimizer.step(num_samples=3)
    with pytest.raises(InputError, match="a closure computes gradients for this step"):
        MultiNodeOptimizer(torch.optim.SGD([weight], lr=1.0), comm, double_buffering=True).step(lambda: 0.0)


def test_a_scaler_is_refused_where_there_are_several_ranks(comm: AbstractCommunicator) -> None:
    """Those whose gradients overflow would leave the step out, and be a step behind from then on."""
    model, scaler = nn.Linear(2, 1), torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = MultiNodeOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), comm, model=model)
    before = model.weight.detach().clone()
    x = torch.full((1, 2), torch.inf if comm.rank == 1 else 1.0)
    scaler.scale(model(x).sum()).backward()
    if comm.size > 1:
        with pytest.raises(InputError, match=r"a GradScaler looks for overflows before .* Use tatami\.DataParallel"):
            scaler.step(optimizer)
    else:
        scaler.step(optimizer)
        torch.testing.assert_close(model.weight.detach(), before - 0.5)
    optimizer.close()


@pytest.mark.ranks(2, 3)
def test_shares_that_batch_normalization_does_not_know_are_refused(comm: AbstractCommunicator) -> None:
    model = create_mnbn_model(network(0), comm)
    optimizer = MultiNodeOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), comm, model=model, weighted=True)
    optimizer.step(num_samples=4)
    with pytest.raises(InputError, match=r"a MultiNodeBatchNorm has weighed .* Use tatami\.DataParallel"):
        optimizer.step(num_samples=4 + comm.rank)
    optimizer.close()


@pytest.mark.ranks(2)
@pytest.mark.threads_only
def test_a_rank_that_does_not_step_is_named(comm: AbstractCommunicator) -> None:
    weight = nn.Parameter(torch.zeros(2))
    optimizer = MultiNodeOptimizer(torch.optim.SGD([weight], lr=1.0), comm)
    weight.grad = torch.ones(2)
    if comm.rank == 0:
        optimizer._comm.timeout_s = 0.2
        with pytest.raises(CommTimeoutError, match="rank 1"):
            optimizer.step()
    comm.barrier()


def test_debug_mode_names_the_rank_whose_gradient_is_not_finite(
    comm: AbstractCommunicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TATAMI_DEBUG", "1")
    model = nn.Linear(2, 2)
    optimizer = MultiNodeOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), comm, model=model)
    before = model.weight.tolist()
    model.bias.grad = torch.tensor([0.0, float("nan") if comm.rank == comm.size - 1 else 1.0])
    with pytest.raises(
        NotFiniteError, match=f"the gradient of bias on rank {comm.size - 1} of {comm.size} is not finite in step 1"
    ):
        optimizer.step()
    assert model.weight.tolist() == before
    optimizer.close()


# -- without an optimizer ----------------------------------------------------------------------------------------------------


def test_the_weights_and_buffers_of_the_root_become_everyones(comm: AbstractCommunicator) -> None:
    model, root = network(comm.rank), comm.size - 1
    model[1].num_batches_tracked.fill_(comm.rank)
    broadcast_model(model, comm, root=root)
    expected = network(root)
    expected[1].num_batches_tracked.fill_(root)
    assert_same(model, expected, tolerance=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_gradients_become_their_mean_twice(comm: AbstractCommunicator, dtype: torch.dtype) -> None:
    """The reference's rows for multi_node_mean_grad: rank-valued, None on odd ranks, None on all; in a model of two dtypes."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2).to(dtype), nn.Linear(2, 1))
    for _ in range(2):
        model.zero_grad()
        for number, parameter in enumerate(model[:2].parameters()):
            parameter.grad = torch.full_like(parameter, comm.rank + number)
        if comm.rank % 2:
            model[0].bias.grad = None
        average_gradients(model, comm)
        ranks = range(comm.size)
        for number, parameter in enumerate(model[:2].parameters()):
            counted = [rank + number for rank in ranks if number != 1 or rank % 2 == 0]
            assert parameter.grad is not None
            assert parameter.grad.dtype == parameter.dtype
            torch.testing.assert_close(parameter.grad, torch.full_like(parameter, sum(counted) / comm.size))
        assert [each.grad for each in model[2].parameters()] == [None, None]


def test_running_statistics_become_their_mean_and_counters_stay(comm: AbstractCommunicator) -> None:
    norm = nn.BatchNorm1d(2)
    for buffer in (norm.running_mean, norm.running_var, norm.num_batches_tracked):
        assert buffer is not None
        buffer.fill_(comm.rank * 3)
    average_buffers(nn.Sequential(nn.Linear(2, 2), norm), comm)
    mean = (comm.size - 1) / 2 * 3
    assert norm.running_mean is not None
    assert norm.running_var is not None
    assert norm.num_batches_tracked is not None
    assert (norm.running_mean.tolist(), norm.running_var.tolist()) == ([mean] * 2, [mean] * 2)
    assert int(norm.num_batches_tracked) == comm.rank * 3


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("wire", "itemsize"), [(None, 4), (torch.float16, 2), (torch.bfloat16, 2), (torch.float64, 8)])
def test_gradients_travel_as_the_dtype_that_was_asked_for(
    comm: AbstractCommunicator, wire: torch.dtype | None, itemsize: int
) -> None:
    recording, weight = Recording(comm), nn.Parameter(torch.zeros(999))
    optimizer = MultiNodeOptimizer(torch.optim.SGD([weight], lr=1.0), recording, wire=wire, algorithm="ring")
    weight.grad = torch.ones(999)
    before = len(recording.calls)
    optimizer.step()
    # Two ranks: half of the vector there, half of the sum back; the gradients and the mark that they are used.
    assert sum(call.size_bytes for call in recording.calls[before:] if "send" in call.operation) == 1000 * itemsize
    optimizer.close()


@pytest.mark.threads_only
@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("tensor", "match"),
    [
        (torch.ones(2, dtype=torch.complex64), r"here: odd is complex64, .* keep it as torch.view_as_real\(odd\)"),
        (torch.eye(2).to_sparse(), r"here: odd is a torch.sparse_coo tensor, .* keep it as odd.to_dense\(\)"),
    ],
)
def test_tensors_that_ranks_do_not_share_are_named_with_the_way_out(
    comm: AbstractCommunicator, tensor: torch.Tensor, match: str
) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("odd", tensor)
    with pytest.raises(InputError, match=match):
        broadcast_model(model, comm, where="here")
