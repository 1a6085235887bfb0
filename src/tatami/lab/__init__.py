"""A cluster on one machine: hosts of unequal speed and link, real MPI over TCP between them, and failures on request."""

from tatami.lab.events import LabEvent, parse_event
from tatami.lab.lab import Lab
from tatami.lab.lab_state import LabState, known_labs, running_lab, take_away
from tatami.lab.launched_job import LabJob
from tatami.lab.needs import missing
from tatami.lab.plan import LabPlan, plan_lab

__all__ = [
    "Lab",
    "LabEvent",
    "LabJob",
    "LabPlan",
    "LabState",
    "known_labs",
    "missing",
    "parse_event",
    "plan_lab",
    "running_lab",
    "take_away",
]
