"""What machines there are."""

from tatami.cluster.cluster import LOCAL_LINK, NETWORK_LINK, Cluster, Link, Processor
from tatami.cluster.speeds import check_speeds, parse_speeds
from tatami.cluster.toml import cluster_toml, read_cluster, write_cluster

__all__ = [
    "LOCAL_LINK",
    "NETWORK_LINK",
    "Cluster",
    "Link",
    "Processor",
    "check_speeds",
    "cluster_toml",
    "parse_speeds",
    "read_cluster",
    "write_cluster",
]
