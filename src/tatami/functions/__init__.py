"""Communication that gradients flow through: write `send` and `recv` inside of `forward`, and train one network on all."""

from tatami.comm.agreement import debug
from tatami.functions.backward import backward, grad
from tatami.functions.collectives import allgather, alltoall, bcast, gather, scatter
from tatami.functions.connecting import Pass, pseudo_connect, share
from tatami.functions.point_to_point import recv, send, sendrecv
from tatami.functions.reductions import allreduce, reduce, reduce_scatter

__all__ = [
    "Pass",
    "allgather",
    "allreduce",
    "alltoall",
    "backward",
    "bcast",
    "debug",
    "gather",
    "grad",
    "pseudo_connect",
    "recv",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
    "sendrecv",
    "share",
]
