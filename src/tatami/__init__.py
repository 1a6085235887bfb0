"""Tatami: train one PyTorch network on machines that are not alike."""

from importlib import import_module
from typing import TYPE_CHECKING

from tatami import errors

if TYPE_CHECKING:
    from tatami.checkpoints.multi_node_checkpoint import MultiNodeCheckpoint
    from tatami.cluster import Cluster, Link, Processor
    from tatami.comm.detect import init
    from tatami.elastic.steps import steps
    from tatami.parallel.batch_norm import MultiNodeBatchNorm
    from tatami.parallel.chain_list import MultiNodeChainList
    from tatami.parallel.data_parallel import DataParallel
    from tatami.parallel.multi_node_optimizer import MultiNodeOptimizer
    from tatami.parallel.parallel_conv import ParallelConv
    from tatami.parallel.scattering import scatter_dataset
    from tatami.planning import PlanComparison, plan
    from tatami.retiling.retiler import Retiler
    from tatami.tiled.model import TiledModel
    from tatami.tiled.tile import tile
    from tatami.tiled.trainer import Trainer
    from tatami.tiling import Plan, Tiling
    from tatami.workload import Workload

__version__ = "0.1.0"

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
    "plan",
    "scatter_dataset",
    "steps",
    "tile",
]

# A name is imported when it is first asked for: torch alone takes seconds, and `tatami plan` must answer in milliseconds.
_HOMES = {
    "Cluster": "tatami.cluster",
    "DataParallel": "tatami.parallel.data_parallel",
    "Link": "tatami.cluster",
    "MultiNodeBatchNorm": "tatami.parallel.batch_norm",
    "MultiNodeChainList": "tatami.parallel.chain_list",
    "MultiNodeCheckpoint": "tatami.checkpoints.multi_node_checkpoint",
    "MultiNodeOptimizer": "tatami.parallel.multi_node_optimizer",
    "ParallelConv": "tatami.parallel.parallel_conv",
    "Plan": "tatami.tiling",
    "PlanComparison": "tatami.planning",
    "Processor": "tatami.cluster",
    "Retiler": "tatami.retiling.retiler",
    "TiledModel": "tatami.tiled.model",
    "Tiling": "tatami.tiling",
    "Trainer": "tatami.tiled.trainer",
    "Workload": "tatami.workload",
    "init": "tatami.comm.detect",
    "plan": "tatami.planning",
    "scatter_dataset": "tatami.parallel.scattering",
    "steps": "tatami.elastic.steps",
    "tile": "tatami.tiled.tile",
}


if not TYPE_CHECKING:  # a type checker would take every misspelt name for one of these

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module 'tatami' has no attribute {name!r}; it has {', '.join(__all__)}")
        value = getattr(import_module(_HOMES[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
