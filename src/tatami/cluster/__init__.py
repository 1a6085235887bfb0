"""What machines there are."""

from tatami.cluster.cluster import Cluster, Processor
from tatami.cluster.link import LOCAL_LINK, NETWORK_LINK, Link, OwnLink
from tatami.cluster.speed_table import SpeedTable, at_sizes, check_speeds, fastest, listed_speeds, parse_speeds, speed_at
from tatami.cluster.toml import cluster_toml, read_cluster, write_cluster

__all__ = [
    "LOCAL_LINK",
    "NETWORK_LINK",
    "Cluster",
    "Link",
    "OwnLink",
    "Processor",
    "SpeedTable",
    "at_sizes",
    "check_speeds",
    "cluster_toml",
    "fastest",
    "listed_speeds",
    "parse_speeds",
    "read_cluster",
    "speed_at",
    "write_cluster",
]
