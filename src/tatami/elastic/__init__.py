"""Tiled runs on Ray whose members die, leave and join: the survivors repair the run, and go on with the same numbers."""

from tatami.elastic.launch import ElasticResult, run_elastic
from tatami.elastic.settings import ElasticContext, ElasticControl, ElasticSettings
from tatami.elastic.steps import RepairedStep, Steps, steps
from tatami.report.elastic_run import ElasticReport, MemberChange
from tatami.state.repairing import Stateful

__all__ = [
    "ElasticContext",
    "ElasticControl",
    "ElasticReport",
    "ElasticResult",
    "ElasticSettings",
    "MemberChange",
    "RepairedStep",
    "Stateful",
    "Steps",
    "run_elastic",
    "steps",
]
