"""Tables and pictures."""

from tatami.report.bandwidth import draw_bandwidth
from tatami.report.course import CoursePoint, draw_course
from tatami.report.drawing import draw_text
from tatami.report.efficiency import Efficiency, EfficiencyRound, efficiency
from tatami.report.members import draw_members
from tatami.report.phases import draw_schedule
from tatami.report.picture import FORMATS, blank, check_path, save
from tatami.report.shares import draw_shares
from tatami.report.tables import MethodResult, Table, memory_table, planner_table, run_table, sized_table
from tatami.report.tiles import draw_tiling
from tatami.report.watched import draw_watched

__all__ = [
    "FORMATS",
    "CoursePoint",
    "Efficiency",
    "EfficiencyRound",
    "MethodResult",
    "Table",
    "blank",
    "check_path",
    "draw_bandwidth",
    "draw_course",
    "draw_members",
    "draw_schedule",
    "draw_shares",
    "draw_text",
    "draw_tiling",
    "draw_watched",
    "efficiency",
    "memory_table",
    "planner_table",
    "run_table",
    "save",
    "sized_table",
]
