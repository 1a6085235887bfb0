"""Data sets: NETtalk and digits."""

from tatami.datasets.dataset import Accuracy, Dataset
from tatami.datasets.load import DEFAULT, NAMES, load

__all__ = ["DEFAULT", "NAMES", "Accuracy", "Dataset", "load"]
