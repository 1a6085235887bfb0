"""Tatami: train one PyTorch network on machines that are not alike."""

from importlib import import_module
from typing import TYPE_CHECKING

from tatami import errors

if TYPE_CHECKING:
    from tatami.cluster import Cluster, Link, Processor
    from tatami.comm.detect import init
    from tatami.nn.batch_norm import MultiNodeBatchNorm
    from tatami.nn.chain_list import MultiNodeChainList
    from tatami.nn.parallel_conv import ParallelConv
    from tatami.nn.tile import tile
    from tatami.nn.tiled import TiledModel
    from tatami.retiling.retiler import Retiler
    from tatami.tiling import Plan, Tiling, plan
    from tatami.train.data_parallel import DataParallel
    from tatami.train.multi_node_checkpoint import MultiNodeCheckpoint
    from tatami.train.multi_node_optimizer import MultiNodeOptimizer
    from tatami.train.scattering import scatter_dataset
    from tatami.train.trainer import Trainer
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
    "tile",
]

# A name is imported when it is first asked for: torch alone takes seconds, and `tatami plan` must answer in milliseconds.
_HOMES = {
    "Cluster": "tatami.cluster",
    "DataParallel": "tatami.train.data_parallel",
    "Link": "tatami.cluster",
    "MultiNodeBatchNorm": "tatami.nn.batch_norm",
    "MultiNodeChainList": "tatami.nn.chain_list",
    "MultiNodeCheckpoint": "tatami.train.multi_node_checkpoint",
    "MultiNodeOptimizer": "tatami.train.multi_node_optimizer",
    "ParallelConv": "tatami.nn.parallel_conv",
    "Plan": "tatami.tiling",
    "Processor": "tatami.cluster",
    "Retiler": "tatami.retiling.retiler",
    "TiledModel": "tatami.nn.tiled",
    "Tiling": "tatami.tiling",
    "Trainer": "tatami.train.trainer",
    "Workload": "tatami.workload",
    "init": "tatami.comm.detect",
    "plan": "tatami.tiling",
    "scatter_dataset": "tatami.train.scattering",
    "tile": "tatami.nn.tile",
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
