"""One GPU, alone and with ranks on CPUs:  tatami run -n N benchmarks/card.py PART

Parts, and the ranks they are for:

    alone   1: one rank on the card against the plain loop, for the GPT of `examples/nanogpt.py` and for GPT-2 124M (8 x 1,024
            tokens), in float32, under autocast, with a scaler and with activation checkpointing
    memory  1: predicted and measured memory of GPT-2 at batches of 2, 4 and 8
    mixed   2, 3: rank 0 on the card, the others on CPUs, as planned by measured speeds; and what one sample on each CPU costs
    shared  2: both ranks on the card with shares of 2 and 1, as replicas and as one replica of tiles

Contestants run in turn. Rank 0 prints a line of JSON for each.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import tatami
from tatami.bench.interleaved import interleaved, machine
from tatami.cli.tasks import CharacterGpt
from tatami.comm.base import AbstractCommunicator
from tatami.errors import TatamiError
from tatami.tiling import AlphaBetaCost, Layout, Replica
from tatami.tiling.memory import memory_bytes
from tatami.train import TiledModel

GPT2 = {"layers": 12, "heads": 12, "width": 768, "tokens": 1024, "characters": 50257}
NANO = {"layers": 2, "heads": 6, "width": 48, "tokens": 32, "characters": 96}
SMALL = {"layers": 2, "heads": 2, "width": 32, "tokens": 16, "characters": 100}
LEARNING_RATE = 1e-4
WARM = 3
"""Iterations before the first that is timed or whose memory counts."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A network, its batch, and how it is computed.

    Attributes:
        sizes: the network's.
        samples: of the batch.
        dtype: of autocast; None: float32.
        checkpointing: whether activations are computed once more.
    """

    name: str
    sizes: dict[str, int]
    samples: int
    dtype: torch.dtype | None = None
    checkpointing: bool = False

    def network(self) -> nn.Module:
        torch.manual_seed(0)
        if self.name.startswith("nanogpt"):
            return CharacterGpt(**self.sizes)
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(
            n_layer=self.sizes["layers"], n_head=self.sizes["heads"], n_embd=self.sizes["width"],
            n_positions=self.sizes["tokens"], vocab_size=self.sizes["characters"],
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
        )  # fmt: skip
        network: nn.Module = GPT2LMHeadModel(config)
        if self.checkpointing:
            network.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
        return network

    def batch(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1)
        return torch.randint(self.sizes["characters"], (self.samples, self.sizes["tokens"]), generator=generator)

    def autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        is_here = device.type == "cpu" or torch.cuda.is_available()
        return nullcontext() if self.dtype is None or not is_here else torch.autocast(device.type, dtype=self.dtype)


def loss_of(result: Any, text: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = getattr(result, "logits", result)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), text[:, 1:].flatten())


class Loop:
    """A loop as people write it: forward, backward and a step of AdamW; with as many micro-batches as the layout says."""

    def __init__(self, case: Case, model: nn.Module, x: torch.Tensor, *, scaled: bool = False) -> None:
        self.model, self._case, self._x = model, case, x
        self.device = x.device
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
        self._scaler = torch.amp.GradScaler(self.device.type, enabled=scaled)

    def run(self, iterations: int) -> None:
        for _ in range(iterations):
            self._step(self.model.parts(self._x) if isinstance(self.model, TiledModel) else [self._x])
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def first_losses(self) -> list[float]:
        """Of the whole batch, in the first iterations, all forward passes first. Collective."""
        losses = [self._step([self._x]) for _ in range(WARM)]
        return [self.model.global_loss(loss) if isinstance(self.model, TiledModel) else float(loss) for loss in losses]

    def _step(self, parts: Iterable[torch.Tensor]) -> torch.Tensor:
        self._optimizer.zero_grad()
        loss = torch.zeros((), device=self.device)
        for x in parts:
            with self._case.autocast(self.device):
                loss = loss_of(self.model(x), x)
            self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        self._scaler.step(self._optimizer)
        self._scaler.update()
        return loss.detach()


def tiled(case: Case, comm: AbstractCommunicator, device: str, **how: Any) -> tuple[TiledModel, torch.Tensor]:
    """The model over all ranks and this rank's part of the batch; the plan is printed."""
    network, batch = case.network(), case.batch()
    with case.autocast(torch.device("cpu")), case.autocast(torch.device("cuda")):  # speeds are those of this precision
        model = tatami.tile(network, comm, batch_size=case.samples, sample=batch[:2], reduction="mean", device=device, **how)
    return model, model.local(batch)


def compare(
    contestants: dict[str, Callable[[int], None]], comm: AbstractCommunicator, *, rounds: int, repeats: int
) -> dict[str, dict[str, float]]:
    """The median of the slowest rank's time of an iteration, its spread, and the median ratio to the first contestant's."""
    for run in contestants.values():
        run(WARM)
    timed = interleaved(contestants, rounds=rounds, repeats=repeats, before=comm.barrier)
    everywhere = comm.allgather_object({name: each.seconds for name, each in timed.items()})
    slowest = {name: [max(each) for each in zip(*(seconds[name] for seconds in everywhere), strict=True)] for name in timed}
    first = slowest[next(iter(contestants))]
    found = {}
    for name, seconds in slowest.items():
        ratios = [own / other for own, other in zip(seconds, first, strict=True)]
        found[name] = {
            "median_s": statistics.median(seconds),
            "fastest_s": min(seconds),
            "slowest_s": max(seconds),
            "ratio": statistics.median(ratios),
            "lowest_ratio": min(ratios),
            "highest_ratio": max(ratios),
        }
    return found


class Part:
    """One part of the benchmark on all ranks."""

    def __init__(self, comm: AbstractCommunicator, args: argparse.Namespace) -> None:
        self.comm, self.args = comm, args
        self.on_card = torch.cuda.is_available() and args.device != "cpu"
        self.here = torch.device("cuda", 0) if self.on_card else torch.device("cpu")

    def tell(self, line: dict[str, object]) -> None:
        if self.comm.rank == 0:
            print(json.dumps({"part": self.args.part, "ranks": self.comm.size, **line}), flush=True)

    def sizes(self, full: dict[str, int]) -> dict[str, int]:
        return SMALL if self.args.small else full

    def case(self, name: str, samples: int = 8, **how: Any) -> Case:
        full = NANO if name.startswith("nanogpt") else GPT2
        return Case(name=name, sizes=self.sizes(full), samples=samples, **how)

    def plain(self, case: Case, *, scaled: bool = False) -> Loop:
        return Loop(case, case.network().to(self.here), case.batch().to(self.here), scaled=scaled)

    def alone(self) -> None:
        half = torch.bfloat16
        cases = [
            (self.case("nanogpt", 16), False, 100),
            (self.case("nanogpt-bfloat16", 16, dtype=half), False, 100),
            (self.case("gpt2", dtype=half), False, 8),
            (self.case("gpt2-checkpointing", dtype=half, checkpointing=True), False, 6),
            (self.case("gpt2-scaler", dtype=torch.float16), True, 8),
            (self.case("gpt2-float32"), False, 3),
        ]
        for case, scaled, repeats in cases:
            if scaled and not self.on_card:
                continue
            if self.args.only not in case.name:
                continue
            try:
                plain = self.plain(case, scaled=scaled)
                model, x = tiled(case, self.comm, str(self.here))
                own = Loop(case, model, x, scaled=scaled)
                error = difference(own.first_losses(), plain.first_losses())
                repeats = 2 if self.args.small else repeats
                found = compare({"plain": plain.run, "tatami": own.run}, self.comm, rounds=7, repeats=repeats)
                self.tell({"case": case.name, "timed": found, "loss_error": error, "predicted_s": predicted_s(model)})
            except (TatamiError, RuntimeError) as error:
                self.tell({"case": case.name, "failed": f"{type(error).__name__}: {error}"[:1000]})
            self.clear()

    def clear(self) -> None:
        gc.collect()
        if self.on_card:
            torch.cuda.empty_cache()

    def memory(self) -> None:
        for dtype in (None, torch.bfloat16):
            for samples in (2, 4, 8):
                case = self.case("gpt2", samples, dtype=dtype)
                base_bytes = torch.cuda.memory_allocated()
                model, x = tiled(case, self.comm, str(self.here), quiet=True)
                loop = Loop(case, model, x)
                loop.run(WARM)
                measured = self._peak_bytes(loop, base_bytes=base_bytes)
                predicted = self._predicted_bytes(model)
                assert measured is not None
                self.tell({
                    "case": f"gpt2 batch {samples} {dtype}", "measured_bytes": measured, "predicted_bytes": predicted,
                    "error": predicted / measured - 1, "reserved_bytes": torch.cuda.max_memory_reserved(),
                })  # fmt: skip
                del model, x, loop
                self.clear()

    def _peak_bytes(self, loop: Loop, *, base_bytes: int) -> int | None:
        """The most that this rank's process takes of the card in an iteration."""
        if not self.on_card or loop.device.type == "cpu":
            return None
        torch.cuda.reset_peak_memory_stats()
        loop.run(1)
        return torch.cuda.max_memory_allocated() - base_bytes

    @staticmethod
    def _predicted_bytes(model: TiledModel) -> float:
        if model.stage is not None:
            assert model.stage.plan is not None
            kept = model.stage.plan.memory_bytes
        else:
            kept = memory_bytes(model.layout, workload=model.workload, cluster=model.cluster)
        return round(kept.get(model.names[model.comm.rank], 0.0))

    def mixed(self) -> None:
        device = "auto" if self.on_card else "cpu"
        case = self.case("gpt2", dtype=torch.bfloat16)
        self._against_the_card(case, device, speeds="measure")
        nano = self.case("nanogpt", 16)
        self._against_the_card(nano, device, speeds="measure")
        names = [f"p{rank}" for rank in range(self.comm.size)]
        few = 1 / nano.samples
        widths = [1 - few * (len(names) - 1)] + [few] * (len(names) - 1)
        replicas = (Replica(width=width, processors=(name,), heights=(1.0,)) for width, name in zip(widths, names, strict=True))
        self._against_the_card(nano, device, layout=Layout(replicas=tuple(replicas)))
        self._against_the_card(nano, device, speeds="measure", stages=self.comm.size)

    def shared(self) -> None:
        device = str(self.here)
        of_replicas = tuple(
            Replica(width=width, processors=(name,), heights=(1.0,)) for width, name in ((2 / 3, "p0"), (1 / 3, "p1"))
        )
        of_tiles = (Replica(width=1.0, processors=("p0", "p1"), heights=(2 / 3, 1 / 3)),)
        for case in (self.case("nanogpt", 16), self.case("gpt2", 12, dtype=torch.bfloat16)):
            for replicas in (of_replicas, of_tiles):
                self._against_the_card(case, device, layout=Layout(replicas=replicas))

    def _against_the_card(self, case: Case, device: str, **how: Any) -> None:
        """All ranks against rank 0 on the card by itself; the global loss of the first iterations is compared."""
        comm = self.comm
        if self.args.only not in case.name:
            return
        plain = self.plain(case) if comm.rank == 0 else None
        base_bytes = torch.cuda.memory_allocated() if self.on_card else 0
        model, x = tiled(case, comm, device, **how)
        own = Loop(case, model, x)
        together = own.first_losses()
        measured_bytes = self._peak_bytes(own, base_bytes=base_bytes)
        kept_bytes = self._predicted_bytes(model)
        error = difference(together, plain.first_losses()) if plain else None
        contestants = {"card alone": plain.run if plain else lambda _: None, "tatami": own.run}
        repeats = 2 if self.args.small else (10 if case.name == "nanogpt" else 3)
        found = compare(contestants, comm, rounds=5, repeats=repeats)
        shares = [len(each) for each in comm.allgather_object(x)]
        self.tell({
            "case": case.name, "asked": [*how], "layout": model.whole_layout.to_dict(),
            "speeds": [str(each.speed)[:200] for each in model.cluster.processors], "shares": shares, "timed": found,
            "loss_error": error, "predicted_s": predicted_s(model),
            "measured_bytes": measured_bytes, "predicted_bytes": kept_bytes,
        })  # fmt: skip
        del model, own, plain
        self.clear()


def difference(losses: Sequence[float], expected: Sequence[float]) -> float:
    """The largest, relative."""
    return max(abs(own - other) / abs(other) for own, other in zip(losses, expected, strict=True))


def predicted_s(model: TiledModel) -> float:
    if model.stage is not None:
        assert model.stage.plan is not None
        return model.stage.plan.iteration_s
    return AlphaBetaCost().price(model.layout, cluster=model.cluster, workload=model.workload).total


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["alone", "memory", "mixed", "shared"])
    parser.add_argument("--device", default="auto", help="cpu: a trial of the program where there is no card")
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--small", action="store_true", help="a tiny network, for a trial")
    args = parser.parse_args(arguments)
    comm = tatami.init()
    part = Part(comm, args)
    card = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    part.tell({"command": " ".join(sys.argv), "card": card, **machine()})
    getattr(part, args.part)()


if __name__ == "__main__":
    main()
