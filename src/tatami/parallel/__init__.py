"""Layers that span ranks, data parallelism, and the kit for training loops written by hand."""

from tatami.comm.session import add_exception_hook
from tatami.parallel.batch_norm import MultiNodeBatchNorm, create_mnbn_model
from tatami.parallel.chain_list import MultiNodeChainList
from tatami.parallel.data_parallel import DataParallel
from tatami.parallel.early_stopping import EarlyStopping
from tatami.parallel.evaluating import Measured, MultiNodeEvaluator, ObservationAggregator, gather_evaluation, weighted_means
from tatami.parallel.multi_node_loader import MultiNodeLoader
from tatami.parallel.multi_node_optimizer import MultiNodeOptimizer
from tatami.parallel.n_step_rnn import MultiNodeNStepRNN, create_multi_node_n_step_rnn
from tatami.parallel.parallel_conv import ParallelConv
from tatami.parallel.sampling import ResumableLoader, SynchronizedSampler
from tatami.parallel.scattering import Portion, create_empty_dataset, scatter_dataset, scatter_index
from tatami.parallel.synchronizing import average_buffers, average_gradients
from tatami.same_model import broadcast_model

__all__ = [
    "DataParallel",
    "EarlyStopping",
    "Measured",
    "MultiNodeBatchNorm",
    "MultiNodeChainList",
    "MultiNodeEvaluator",
    "MultiNodeLoader",
    "MultiNodeNStepRNN",
    "MultiNodeOptimizer",
    "ObservationAggregator",
    "ParallelConv",
    "Portion",
    "ResumableLoader",
    "SynchronizedSampler",
    "add_exception_hook",
    "average_buffers",
    "average_gradients",
    "broadcast_model",
    "create_empty_dataset",
    "create_mnbn_model",
    "create_multi_node_n_step_rnn",
    "gather_evaluation",
    "scatter_dataset",
    "scatter_index",
    "weighted_means",
]
