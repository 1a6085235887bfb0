"""Networks that are cut into stages, and stages as threads."""

import copy
import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import tatami
from tatami.comm.base import AbstractCommunicator
from tatami.stages.channel import AbstractChannel, Parcel
from tatami.stages.program import ForwardProgram, Staging, obstacle_of
from tatami.stages.recording import record
from tatami.stages.running import StageRunner, release
from tatami.stages.stand_in import StandIn
from tatami.tiling import Layout, StagedLayout
from tatami.train import TiledModel

Loss = Callable[[Any, torch.Tensor], torch.Tensor]
AdamW = partial(torch.optim.AdamW, lr=0.01, eps=1e-4)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A network, a batch of it, and its loss.

    Attributes:
        make: the network, in float64, the same in every call.
        x: (samples, ...), or named inputs of them.
        y: (samples, ...)
        loss: a mean over the samples.
    """

    make: Callable[[], nn.Module]
    x: Mapping[str, torch.Tensor]
    y: torch.Tensor
    loss: Loss


class Sent:
    """Parcels on their way within one process. A parcel has one queue, also where two threads ask for it at the same time."""

    def __init__(self) -> None:
        self._queues: dict[Parcel, queue.Queue[torch.Tensor | None]] = {}
        self._lock = threading.Lock()

    def __getitem__(self, parcel: Parcel) -> queue.Queue[torch.Tensor | None]:
        with self._lock:
            return self._queues.setdefault(parcel, queue.Queue())


class Queues(AbstractChannel):
    """Parcels within one process. A parcel that does not come fails the test in some seconds."""

    def __init__(self, sent: Sent, *, timeout_s: float) -> None:
        self.sent, self.timeout_s = sent, timeout_s

    def send(self, parcel: Parcel, tensor: torch.Tensor | None) -> None:
        self.sent[parcel].put(None if tensor is None else tensor.clone())

    def receive(self, parcel: Parcel) -> torch.Tensor | None:
        return self.sent[parcel].get(timeout=self.timeout_s)

    def flush(self) -> None:
        pass


def program_of(case: Case) -> ForwardProgram:
    return record(case.make(), (), case.x)


def played(
    case: Case, staging: Staging, *, micro_batches: int = 1, timeout_s: float = 60.0, is_released: bool = True
) -> tuple[torch.Tensor, dict[str, torch.Tensor | None], list[nn.Module]]:
    """One step of all stages: the loss on the last one, the gradients summed over the stages, and each stage's network."""
    sent = Sent()
    networks: list[nn.Module] = [case.make() for _ in range(staging.num_stages)]
    losses: dict[int, torch.Tensor] = {}
    errors: list[BaseException] = []

    def stage(number: int) -> None:
        try:
            if is_released:
                release(networks[number], staging=staging, stage=number)
            runner = StageRunner(networks[number], staging=staging, stage=number, channel=Queues(sent, timeout_s=timeout_s))
            chunks = zip(*(tensor.tensor_split(micro_batches) for tensor in case.x.values()), strict=True)
            outs = [
                runner.run((), dict(zip(case.x, chunk, strict=True)), micro_batch=index, num_micro_batches=micro_batches)
                for index, chunk in enumerate(chunks)
            ]
            losses[number] = case.loss(outs[0] if len(outs) == 1 else torch.cat(outs), case.y)
            torch.autograd.backward(losses[number])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=stage, args=(number,), daemon=True) for number in range(staging.num_stages)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s + 30)
    real = [error for error in errors if not isinstance(error, queue.Empty)]
    if errors:
        raise (real or errors)[0]
    grads: dict[str, torch.Tensor | None] = {}
    for network in networks:
        for name, parameter in network.named_parameters(remove_duplicate=False):
            if isinstance(parameter, StandIn) or parameter.grad is None:
                grads.setdefault(name, None)
            else:
                before = grads.get(name)
                grads[name] = parameter.grad if before is None else before + parameter.grad
    return losses[staging.num_stages - 1], grads, networks


def plain(case: Case) -> tuple[torch.Tensor, dict[str, torch.Tensor | None]]:
    network = case.make()
    loss = case.loss(network(**case.x), case.y)
    torch.autograd.backward(loss)
    return loss, {name: parameter.grad for name, parameter in network.named_parameters(remove_duplicate=False)}


def plain_run(case: Case, *, steps: int) -> dict[str, torch.Tensor]:
    network = case.make()
    optimizer = AdamW(network.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        torch.autograd.backward(case.loss(network(**case.x), case.y))
        torch.nn.utils.clip_grad_norm_(network.parameters(), 0.5)
        optimizer.step()
    return network.state_dict()


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-10, atol=1e-12, msg=f"{name} differs")


def allowed_cuts(program: ForwardProgram) -> tuple[int, ...]:
    """The operations in front of which the program may be cut."""
    return tuple(cut for cut in range(1, len(program.operations)) if obstacle_of(program, cut) is None)


def even_cuts(program: ForwardProgram, stages: int) -> tuple[int, ...]:
    """Cuts into stages of about equally many operations."""
    allowed, total = allowed_cuts(program), len(program.operations)
    return tuple(sorted({min(allowed, key=lambda cut: abs(cut - total * part / stages)) for part in range(1, stages)}))


# -- networks -----------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.heads = heads

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> Any:
        samples, tokens, width = x.shape
        q, k, v = (
            t.view(samples, tokens, self.heads, width // self.heads).transpose(1, 2) for t in self.qkv(self.n1(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(mixed.transpose(1, 2).reshape(samples, tokens, width))
        return x + self.mlp(self.n2(x))


class Gpt(nn.Module):
    """Weights outside of modules, a mask that depends on the length, and tied embedding and head where `tied`."""

    def __init__(self, *, tied: bool, layers: int = 3, width: int = 16) -> None:
        super().__init__()
        self.tokens = nn.Embedding(33, width)
        self.positions = nn.Parameter(torch.randn(12, width))
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 33, bias=False)
        self.scale = nn.Parameter(torch.ones(width))
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, x: torch.Tensor) -> Any:
        length = x.shape[1]
        assert length <= 12
        hidden = self.tokens(x) + self.positions[:length]
        mask = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        for block in self.blocks:
            hidden = block(hidden, mask)
        return self.head(self.norm(hidden) * self.scale)


class UNet(nn.Module):
    """Two skip connections, concatenated."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = _conv(1, 4), _conv(4, 8), _conv(8, 8)
        self.u, self.v, self.o = _conv(16, 4), _conv(8, 4), nn.Conv2d(4, 3, 1)

    def forward(self, x: torch.Tensor) -> Any:
        a = self.a(x)
        b = self.b(F.max_pool2d(a, 2))
        c = self.c(F.max_pool2d(b, 2))
        u = self.u(torch.cat([F.interpolate(c, scale_factor=2), torch.relu(b)], 1))
        v = self.v(torch.cat([F.interpolate(u, scale_factor=2), a], 1))
        return self.o(v).mean((2, 3))


def _conv(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(2, outputs), nn.ReLU())


class EncoderDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.encoder = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in range(2))
        self.decoder = nn.ModuleList(nn.TransformerDecoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in range(2))
        self.out = nn.Linear(8, 20)

    def forward(self, x: torch.Tensor) -> Any:
        memory, y = self.embed(x), self.embed(x.flip(1))
        for layer in self.encoder:
            memory = layer(memory)
        for layer in self.decoder:
            y = layer(y, memory)
        return self.out(y).mean(1)


class Lstm(nn.Module):
    """The state of the first recurrent layer begins the second one's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.a, self.b = nn.LSTM(8, 8, batch_first=True), nn.LSTM(8, 8, batch_first=True)
        self.out = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> Any:
        hidden, (h, c) = self.a(self.embed(x))
        hidden, _ = self.b(hidden, (h.contiguous(), c.contiguous()))
        return self.out(hidden[:, -1])


class CalledTwice(nn.Module):
    """One layer at two places, a value that is used far behind, and an in-place addition."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.shared, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> Any:
        first = torch.tanh(self.a(x))
        y = torch.tanh(self.shared(first))
        y = torch.tanh(self.b(y))
        y = self.shared(y)
        z = y * 2
        z += first.mean(1, keepdim=True)
        return self.c(z)


class InsideAndBehind(nn.Module):
    """A module that is called inside of another one, and right behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.bend = nn.Tanh()
        self.first, self.last = nn.Sequential(nn.Linear(6, 6), self.bend), nn.Sequential(nn.Linear(6, 6), self.bend)
        self.out = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> Any:
        return self.out(self.bend(self.last(2 * self.bend(self.first(x)))))


class Mixture(nn.Module):
    """Three experts, each of which computes all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(9, 3), nn.ModuleList(nn.Sequential(nn.Linear(9, 9), nn.Tanh()) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.gate(x).softmax(-1).unbind(-1)
        return sum((expert(x) * own[:, None] for expert, own in zip(self.experts, weights, strict=True)), x)


def perceptron() -> nn.Module:
    """Two pairs of linear layers, and a mixture of experts between them."""
    first, last = (nn.Linear(6, 17), nn.Tanh(), nn.Linear(17, 9)), (nn.Linear(9, 13), nn.ReLU(), nn.Linear(13, 3))
    return nn.Sequential(*first, Mixture(), *last)


def made(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        network = make().double()
    return lambda: copy.deepcopy(network)


def tokens_loss(out: Any, y: torch.Tensor) -> torch.Tensor:
    logits = out if isinstance(out, torch.Tensor) else out.logits
    return F.cross_entropy(logits.flatten(0, 1), y.flatten())


def class_loss(out: Any, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(out if isinstance(out, torch.Tensor) else out.logits, y)


def numbers(*shape: int, below: int, seed: int = 3) -> torch.Tensor:
    return torch.randint(0, below, shape, generator=torch.Generator().manual_seed(seed))


def floats(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)


class Noisy(nn.Module):
    """Dropout in several layers, a residual connection, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Dropout(0.3), nn.Linear(9, 12))
        self.middle = nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 12), nn.Dropout(0.2))
        self.last = nn.Sequential(nn.Tanh(), nn.Linear(12, 8), nn.Dropout(0.1), nn.Linear(8, 3))

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.first(x)
        return self.last(hidden + self.middle(hidden))


CASES: dict[str, Callable[[], Case]] = {
    "gpt": lambda: Case(
        make=made(lambda: Gpt(tied=False)),
        x={"x": numbers(6, 12, below=33)},
        y=numbers(6, 12, below=33, seed=7),
        loss=tokens_loss,
    ),
    "gpt-tied": lambda: Case(
        make=made(lambda: Gpt(tied=True)),
        x={"x": numbers(6, 12, below=33)},
        y=numbers(6, 12, below=33, seed=7),
        loss=tokens_loss,
    ),
    "u-net": lambda: Case(make=made(UNet), x={"x": floats(6, 1, 8, 8)}, y=numbers(6, below=3), loss=class_loss),
    "encoder-decoder": lambda: Case(
        make=made(EncoderDecoder), x={"x": numbers(6, 7, below=20)}, y=numbers(6, below=20), loss=class_loss
    ),
    "lstm": lambda: Case(make=made(Lstm), x={"x": numbers(6, 7, below=20)}, y=numbers(6, below=5), loss=class_loss),
    "perceptron": lambda: Case(make=made(perceptron), x={"input": floats(11, 6)}, y=numbers(11, below=3), loss=class_loss),
    "called-twice": lambda: Case(make=made(CalledTwice), x={"x": floats(6, 6)}, y=numbers(6, below=3), loss=class_loss),
    "inside-and-behind": lambda: Case(
        make=made(InsideAndBehind), x={"x": floats(6, 6)}, y=numbers(6, below=3), loss=class_loss
    ),
}
"""Networks that can be cut in front of every operation."""


def tiled(case: Case, comm: AbstractCommunicator, layout: Layout | StagedLayout, *, device: str | None = None) -> TiledModel:
    return tatami.tile(
        case.make(), comm, batch_size=len(case.y), sample=case.x, layout=layout, speeds="equal", reduction="mean", quiet=True,
        device=device,
    )  # fmt: skip
