"""Communication as data: an all-reduce is a `Schedule`, one file for each algorithm; `verify` proves it, `price` prices it."""

from tatami.collective.accumulate import accumulate
from tatami.collective.direct import direct
from tatami.collective.grid import Grid, choose_grid
from tatami.collective.halving import halving_doubling
from tatami.collective.hierarchical import hierarchical
from tatami.collective.native import native
from tatami.collective.pattern import AbstractPattern, Explicit, Native
from tatami.collective.price import PhaseCost, ScheduleCost, price
from tatami.collective.registry import ALGORITHMS, Algorithm, build
from tatami.collective.ring import ring
from tatami.collective.schedule import Phase, Schedule
from tatami.collective.shared import shared
from tatami.collective.simulate import simulate
from tatami.collective.step import RankGroup, Role, Step, Sync, Via, sums_of
from tatami.collective.table import Fingerprint, SizeTimings, TuningTable
from tatami.collective.torus import torus, torus_put
from tatami.collective.verify import verify

__all__ = [
    "ALGORITHMS",
    "AbstractPattern",
    "Algorithm",
    "Explicit",
    "Fingerprint",
    "Grid",
    "Native",
    "Phase",
    "PhaseCost",
    "RankGroup",
    "Role",
    "Schedule",
    "ScheduleCost",
    "SizeTimings",
    "Step",
    "Sync",
    "TuningTable",
    "Via",
    "accumulate",
    "build",
    "choose_grid",
    "direct",
    "halving_doubling",
    "hierarchical",
    "native",
    "price",
    "ring",
    "shared",
    "simulate",
    "sums_of",
    "torus",
    "torus_put",
    "verify",
]
