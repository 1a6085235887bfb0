"""What a run left behind as tables, pictures and one HTML page (`tatami.report.page`); what runs on Ray report."""

from typing import TYPE_CHECKING

from tatami.lazy import lazy_names

if TYPE_CHECKING:
    from tatami.report.answers import AnswerLike, answer_table, draw_answers
    from tatami.report.bandwidth import draw_bandwidth
    from tatami.report.course import CoursePoint, draw_course
    from tatami.report.drawing import draw_text
    from tatami.report.measured_rounds import Efficiency, EfficiencyRound, efficiency
    from tatami.report.picture import FORMATS, blank, check_path, save
    from tatami.report.ray_runs import draw_members
    from tatami.report.tables import MethodResult, Table, run_table
    from tatami.report.tiles import draw_tiling
    from tatami.report.watched import draw_watched

__all__ = [
    "FORMATS",
    "AnswerLike",
    "CoursePoint",
    "Efficiency",
    "EfficiencyRound",
    "MethodResult",
    "Table",
    "answer_table",
    "blank",
    "check_path",
    "draw_answers",
    "draw_bandwidth",
    "draw_course",
    "draw_members",
    "draw_text",
    "draw_tiling",
    "draw_watched",
    "efficiency",
    "run_table",
    "save",
]

if not TYPE_CHECKING:
    __getattr__ = lazy_names(
        __name__,
        {
            "tatami.report.answers": ("AnswerLike", "answer_table", "draw_answers"),
            "tatami.report.bandwidth": ("draw_bandwidth",),
            "tatami.report.course": ("CoursePoint", "draw_course"),
            "tatami.report.drawing": ("draw_text",),
            "tatami.report.measured_rounds": ("Efficiency", "EfficiencyRound", "efficiency"),
            "tatami.report.ray_runs": ("draw_members",),
            "tatami.report.picture": ("FORMATS", "blank", "check_path", "save"),
            "tatami.report.tables": ("MethodResult", "Table", "run_table"),
            "tatami.report.tiles": ("draw_tiling",),
            "tatami.report.watched": ("draw_watched",),
        },
    )
