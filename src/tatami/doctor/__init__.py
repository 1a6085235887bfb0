"""What is here, what differs between hosts and what stands between them; and what to do about it."""

from tatami.doctor.diagnosis import Diagnosis, compared, connected, diagnosed, steps_to_take
from tatami.doctor.host_facts import HostFacts, facts_here
from tatami.doctor.hosts import Examination, examine
from tatami.doctor.load import LoadWatch, MachineLoad
from tatami.doctor.trials import Trial, tried

__all__ = [
    "Diagnosis",
    "Examination",
    "HostFacts",
    "LoadWatch",
    "MachineLoad",
    "Trial",
    "compared",
    "connected",
    "diagnosed",
    "examine",
    "facts_here",
    "steps_to_take",
    "tried",
]
