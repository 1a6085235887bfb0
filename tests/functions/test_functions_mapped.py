"""One way through nested values: every leaf is changed, and what holds the leaves keeps its type."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import NamedTuple

import torch

from tatami.functions.structure import mapped, with_tensors


class Pair(NamedTuple):
    one: object
    other: object


class Outputs(OrderedDict[str, torch.Tensor]):
    """As the outputs of some libraries: keys are attributes, too, and only single items may be set."""

    def __setitem__(self, key: str, value: torch.Tensor) -> None:
        super().__setitem__(key, value)
        setattr(self, key, value)

    def update(self, *_: object, **__: object) -> None:
        raise AssertionError("outputs are not updated as a whole")


def test_every_leaf_is_changed_and_every_type_stays() -> None:
    value = {"a": [1, (2, Pair(3, [4]))], "b": 5, "c": ()}
    changed = mapped(value, lambda leaf: leaf * 10)
    assert changed == {"a": [10, (20, Pair(30, [40]))], "b": 50, "c": ()}
    assert type(changed["a"][1][1]) is Pair
    assert value == {"a": [1, (2, Pair(3, [4]))], "b": 5, "c": ()}
    assert mapped(7, lambda leaf: leaf + 1) == 8


def test_dicts_of_other_types_stay_what_they_are() -> None:
    words = defaultdict(list, {"x": [1]})
    changed = mapped(words, lambda leaf: -leaf)
    assert changed == {"x": [-1]}
    assert changed["missing"] == []
    outputs = Outputs()
    outputs["logits"] = torch.ones(2)
    doubled = with_tensors(outputs, lambda tensor: 2 * tensor)
    assert type(doubled) is Outputs
    assert doubled["logits"].tolist() == doubled.__dict__["logits"].tolist() == [2.0, 2.0]
    assert outputs["logits"].tolist() == [1.0, 1.0]


def test_only_tensors_are_given_to_what_changes_tensors() -> None:
    value = [torch.zeros(1), "text", None, (torch.ones(1), 3.0)]
    changed = with_tensors(value, lambda tensor: tensor.item() + 1)
    assert changed == [1.0, "text", None, (2.0, 3.0)]
