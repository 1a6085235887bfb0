"""Moving bytes between ranks: what a communicator is, its backends, and how ranks are found and started."""

from tatami.comm.agreement import fail_together
from tatami.comm.allreduce import AllReduce, AllReduceSpec, release, tuned_allreduce
from tatami.comm.base import AbstractCommunicator, AbstractRequest
from tatami.comm.detect import BACKENDS, init
from tatami.comm.launch import run
from tatami.comm.reduction import Op, Reduction
from tatami.comm.threads import run_threads
from tatami.comm.wrapper import Call, Recording, WrappedCommunicator

__all__ = [
    "BACKENDS",
    "AbstractCommunicator",
    "AbstractRequest",
    "AllReduce",
    "AllReduceSpec",
    "Call",
    "Op",
    "Recording",
    "Reduction",
    "WrappedCommunicator",
    "fail_together",
    "init",
    "release",
    "run",
    "run_threads",
    "tuned_allreduce",
]
