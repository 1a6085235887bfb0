"""Who gets which rectangle."""

from tatami.tiling.advice import Advice, advise, alone_warning, fastest_alone
from tatami.tiling.alphabeta import AlphaBetaCost
from tatami.tiling.bounds import time_bound_s, volume_bytes
from tatami.tiling.cost import AbstractCost, Cost, PaperCost
from tatami.tiling.gradient_messages import Message, gradient_messages
from tatami.tiling.grid import GridPlanner, GridRevPlanner
from tatami.tiling.layout import GRAIN, Layout, Replica
from tatami.tiling.limits import Obstacle, PlanLimits, limits
from tatami.tiling.links import SlowestLink
from tatami.tiling.merge import SMALL_GROUP, SrpmMergedPlanner, remove_small_groups
from tatami.tiling.plan import DEFAULT_PLANNER, PLANNERS, Plan, compare, find_planner, plan
from tatami.tiling.planner import AbstractPlanner
from tatami.tiling.span import FEW, Span, largest_remainder, spans, whole_shares
from tatami.tiling.speeds import at_equal_times, at_tiles, tile_flop, with_speeds
from tatami.tiling.srpm import SrpmPlanner, SrpmTable, srpm_table
from tatami.tiling.staged import choose, plan_stages
from tatami.tiling.staged_layout import StagedLayout
from tatami.tiling.staged_price import StagedPlan, StagedRank, price_stages
from tatami.tiling.tiling import OwnedUnits, Tile, Tiling
from tatami.tiling.timed import TimedPlanner
from tatami.tiling.timeline import ProcessorTime, timeline
from tatami.tiling.traffic import PlannedSum, SumKind, Traffic, link_bytes, traffic_of
from tatami.tiling.weighted import EvenPlanner, WeightedPlanner

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
    "Cost",
    "EvenPlanner",
    "GridPlanner",
    "GridRevPlanner",
    "Layout",
    "Message",
    "Obstacle",
    "OwnedUnits",
    "PaperCost",
    "Plan",
    "PlanLimits",
    "PlannedSum",
    "ProcessorTime",
    "Replica",
    "SlowestLink",
    "Span",
    "SrpmMergedPlanner",
    "SrpmPlanner",
    "SrpmTable",
    "StagedLayout",
    "StagedPlan",
    "StagedRank",
    "SumKind",
    "Tile",
    "Tiling",
    "TimedPlanner",
    "Traffic",
    "WeightedPlanner",
    "advise",
    "alone_warning",
    "at_equal_times",
    "at_tiles",
    "choose",
    "compare",
    "fastest_alone",
    "find_planner",
    "gradient_messages",
    "largest_remainder",
    "limits",
    "link_bytes",
    "plan",
    "plan_stages",
    "price_stages",
    "remove_small_groups",
    "spans",
    "srpm_table",
    "tile_flop",
    "time_bound_s",
    "timeline",
    "traffic_of",
    "volume_bytes",
    "whole_shares",
    "with_speeds",
]
