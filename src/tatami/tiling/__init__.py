"""Who gets which rectangle."""

from tatami.tiling.advice import Advice, advise
from tatami.tiling.alphabeta import AlphaBetaCost, hiding_pays
from tatami.tiling.bounds import VolumeBounds, time_bound_s, volume_bounds, volume_bytes
from tatami.tiling.cost import AbstractCost, Cost
from tatami.tiling.even import EvenPlanner
from tatami.tiling.grid import GridPlanner
from tatami.tiling.gridrev import GridRevPlanner
from tatami.tiling.horizontal import Message, horizontal_messages
from tatami.tiling.layout import GRAIN, Column, Layout
from tatami.tiling.merge import SMALL_GROUP, SrpmMergedPlanner, remove_small_groups
from tatami.tiling.paper import PaperCost
from tatami.tiling.plan import DEFAULT_PLANNER, PLANNERS, Plan, check_sizes, compare, find_planner, plan
from tatami.tiling.planner import AbstractPlanner
from tatami.tiling.span import FEW, Span, largest_remainder, spans, whole_shares
from tatami.tiling.speeds import at_equal_times, at_tiles, tile_flop, with_speeds
from tatami.tiling.srpm import SrpmPlanner, SrpmTable, srpm_table
from tatami.tiling.tile import Tile
from tatami.tiling.tiling import Group, Tiling
from tatami.tiling.timed import TimedPlanner
from tatami.tiling.traffic import PlannedSum, SumKind, Traffic, link_bytes, traffic_of
from tatami.tiling.weighted import WeightedPlanner

__all__ = [
    "DEFAULT_PLANNER",
    "FEW",
    "GRAIN",
    "PLANNERS",
    "SMALL_GROUP",
    "AbstractCost",
    "AbstractPlanner",
    "Advice",
    "AlphaBetaCost",
    "Column",
    "Cost",
    "EvenPlanner",
    "GridPlanner",
    "GridRevPlanner",
    "Group",
    "Layout",
    "Message",
    "PaperCost",
    "Plan",
    "PlannedSum",
    "Span",
    "SrpmMergedPlanner",
    "SrpmPlanner",
    "SrpmTable",
    "SumKind",
    "Tile",
    "Tiling",
    "TimedPlanner",
    "Traffic",
    "VolumeBounds",
    "WeightedPlanner",
    "advise",
    "at_equal_times",
    "at_tiles",
    "check_sizes",
    "compare",
    "find_planner",
    "hiding_pays",
    "horizontal_messages",
    "largest_remainder",
    "link_bytes",
    "plan",
    "remove_small_groups",
    "spans",
    "srpm_table",
    "tile_flop",
    "time_bound_s",
    "traffic_of",
    "volume_bounds",
    "volume_bytes",
    "whole_shares",
    "with_speeds",
]
