"""Tatami: train one PyTorch network on machines that are not alike."""

from typing import TYPE_CHECKING

from tatami import errors
from tatami.distribution import __version__
from tatami.lazy import lazy_names

if TYPE_CHECKING:
    from tatami import comm as comm  # so that a type checker knows `tatami.comm.AbstractCommunicator`
    from tatami.checkpoints.multi_node_checkpoint import MultiNodeCheckpoint
    from tatami.cluster import Cluster, Link, Processor
    from tatami.comm.detect import init
    from tatami.elastic.steps import steps
    from tatami.model.model import TiledModel
    from tatami.model.tile import tile
    from tatami.parallel.batch_norm import MultiNodeBatchNorm
    from tatami.parallel.chain_list import MultiNodeChainList
    from tatami.parallel.data_parallel import DataParallel
    from tatami.parallel.multi_node_optimizer import MultiNodeOptimizer
    from tatami.parallel.parallel_conv import ParallelConv
    from tatami.parallel.scattering import scatter_dataset
    from tatami.planning import PlanComparison, plan
    from tatami.retiling.retiler import Retiler
    from tatami.tiling import Plan, Tiling
    from tatami.train.own_checkpoints import load_training, save_training
    from tatami.train.trainer import Trainer
    from tatami.workload import Workload

__all__ = [
    "Cluster",
    "DataParallel",
    "Link",
    "MultiNodeBatchNorm",
    "MultiNodeChainList",
    "MultiNodeCheckpoint",
    "MultiNodeOptimizer",
    "ParallelConv",
    "Plan",
    "PlanComparison",
    "Processor",
    "Retiler",
    "TiledModel",
    "Tiling",
    "Trainer",
    "Workload",
    "__version__",
    "errors",
    "init",
    "load_training",
    "plan",
    "save_training",
    "scatter_dataset",
    "steps",
    "tile",
]

# A name is imported when it is first asked for: torch alone takes seconds, and `tatami plan` must answer in milliseconds.
if not TYPE_CHECKING:  # a type checker would take every misspelt name for one of these
    __getattr__ = lazy_names(
        __name__,
        {
            "tatami.checkpoints.multi_node_checkpoint": ("MultiNodeCheckpoint",),
            "tatami.cluster": ("Cluster", "Link", "Processor"),
            "tatami.comm.detect": ("init",),
            "tatami.elastic.steps": ("steps",),
            "tatami.parallel.batch_norm": ("MultiNodeBatchNorm",),
            "tatami.parallel.chain_list": ("MultiNodeChainList",),
            "tatami.parallel.data_parallel": ("DataParallel",),
            "tatami.parallel.multi_node_optimizer": ("MultiNodeOptimizer",),
            "tatami.parallel.parallel_conv": ("ParallelConv",),
            "tatami.parallel.scattering": ("scatter_dataset",),
            "tatami.planning": ("PlanComparison", "plan"),
            "tatami.retiling.retiler": ("Retiler",),
            "tatami.model.model": ("TiledModel",),
            "tatami.train.own_checkpoints": ("load_training", "save_training"),
            "tatami.model.tile": ("tile",),
            "tatami.train.trainer": ("Trainer",),
            "tatami.tiling": ("Plan", "Tiling"),
            "tatami.workload": ("Workload",),
        },
    )
