"""The options that select the network to plan or simulate."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated

import typer

from tatami.cli.options import optional
from tatami.errors import InputError
from tatami.workload import VOCABULARY, Workload, gpt_workload, net_workload

_OF_NETWORKS = ("net", "layers", "width", "heads", "kv_heads", "tokens", "vocabulary")
_gpt = partial(typer.Option, rich_help_panel="A GPT")


@dataclass(frozen=True, kw_only=True)
class NetworkOptions:
    """A network and its batch; the help texts of the options describe the fields."""

    net: Annotated[str, typer.Option(help="Layer sizes: inputs-hidden-...-outputs.")] = "203-80-26"
    samples: Annotated[int, typer.Option(min=1, help="Global batch size, in samples; for a GPT in sequences.")] = 1024
    wire: Annotated[str | None, optional(metavar="NAME", help="Dtype in which sums are sent: bfloat16 or float16.")] = None
    model: Annotated[
        str | None, _gpt(metavar="gpt", help="Model to use instead of --net; give --samples, too.", show_default=False)
    ] = None
    layers: Annotated[int, _gpt(min=1, help="Number of layers.")] = 12
    width: Annotated[int, _gpt(min=1, help="Embedding width.")] = 768
    heads: Annotated[int, _gpt(min=1, help="Number of attention heads.")] = 12
    kv_heads: Annotated[int | None, _gpt(min=1, help="Number of key/value heads, if smaller.", show_default=False)] = None
    tokens: Annotated[int, _gpt(min=1, help="Sequence length in tokens.")] = 1024
    vocabulary: Annotated[int, _gpt(min=1, help="Vocabulary size.")] = VOCABULARY

    def workload(self, *, samples: int | None = None) -> Workload:
        """Return the network, with `samples` in place of the option's number if given.

        Raises:
            InputError: an unknown model, or invalid sizes of its layers.
        """
        samples = self.samples if samples is None else samples
        usual = NetworkOptions()
        given = [f"--{each.replace('_', '-')}" for each in _OF_NETWORKS if getattr(self, each) != getattr(usual, each)]
        if self.model is None and (of_gpt := [each for each in given if each != "--net"]):
            raise InputError(f"{', '.join(of_gpt)}: options of a GPT, and the network is {self.net}; give --model gpt")
        if self.model is not None and "--net" in given:
            raise InputError(f"--net {self.net} and --model {self.model} are two networks: give one of them")
        if self.model is None:
            return replace(net_workload(self.net, samples=samples), wire=self.wire, overlaps_sums=True)
        if self.model != "gpt":
            raise InputError(
                f"there is no model {self.model!r} here; choose gpt, or give --net the sizes of the layers. One of your own "
                "is planned in Python: tatami.plan(network, cluster=..., batch_size=..., sample=...)"
            )
        found = gpt_workload(
            layers=self.layers,
            width=self.width,
            heads=self.heads,
            kv_heads=self.kv_heads,
            tokens=self.tokens,
            vocabulary=self.vocabulary,
            samples=samples,
        )
        return replace(found, wire=self.wire, overlaps_sums=True)

    @property
    def called(self) -> str:
        """Return the name of the network for titles."""
        return self.net if self.model is None else f"a GPT of {self.layers} layer{'s' if self.layers > 1 else ''}"
