"""Whether modules are what they were when the network was tiled: their attributes, their children, their hooks.

A followed module runs a program, in which its numbers and flags are constants, and its inner modules are not called: what is
changed in them after `tatami.tile` would have no effect. Between the layers of a pair the user's own Python runs, with some of
the units on each rank: what mixes units, as a softmax in place of an activation does, would be wrong there.

It is looked at in every forward pass in which ranks share units, so it compares whole lists, in C, by identity first, and dicts
that are empty, as most of those of hooks are, are put there that notice when something is added.
"""

from __future__ import annotations

import operator
import reprlib
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import nn

from tatami.errors import ModelError
from tatami.partition.tracing.restore_state import NOT_ATTRIBUTES, alike

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_FREE = frozenset({
    "inplace", "_is_full_backward_hook", "_non_persistent_buffers_set", "forward", "in_features", "out_features", "in_channels",
    "out_channels", "num_features", "elementwise_affine",
})  # fmt: skip
_PLAIN = (int, float, complex, str, list, tuple, dict, set)
_READ_BY_PROGRAMS = frozenset({"momentum", "eps"})
"""Settings of batch normalization that a program reads in every pass."""


def has_hooks(module: nn.Module, *, forward: bool = True) -> bool:
    """Whether the module itself or a parameter of its own has hooks, which must be called with whole tensors.

    Args:
        forward: whether forward hooks count, which are a part of the programs of modules that are followed.
    """
    own: list[Any] = [vars(module)[name] for name in _HOOKS[0 if forward else 1 :]]
    for parameter in module._parameters.values():
        if parameter is not None:
            own += [parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None)]
    return any(own)


def hooked_inside(module: nn.Module) -> str | None:
    """A module inside of this one that has forward hooks, which a program of this one would not call; those of torch that
    compute weights (`torch.nn.utils.weight_norm`) are a part of the program."""
    for name, inner in module.named_modules():
        hooks = [hook for kind in _HOOKS[:2] for hook in vars(inner)[kind].values()]
        if name and any(not getattr(hook, "__module__", "").startswith("torch.") for hook in hooks):
            return str(name)
    return None


class _Noticing(OrderedDict[Any, Any]):
    """A dict of hooks or layers that tells when one is added.

    Args:
        noticed: gets an element then.
    """

    def __init__(self, noticed: list[bool]) -> None:
        super().__init__()
        self._noticed = noticed

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        self._noticed.append(True)

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, (list(self.items()),)


class ModuleSettings:
    """The settings of one tiled network, as they are when this object is made.

    Args:
        followed: names of the modules that run a program.
        partial: names of the modules that see some of the units, as those of a pair and between its layers do, each with the
            kinds of hooks that are called with whole tensors all the same.
        replaceable: whether a module or function that was put between the layers of a pair works element by element.
    """

    def __init__(
        self,
        network: nn.Module,
        *,
        followed: Collection[str],
        partial: Mapping[str, Collection[str]],
        replaceable: Callable[[Any], bool],
    ) -> None:
        self._replaceable = replaceable
        self._noticed: list[bool] = []
        self._followed = [
            (inner_name, inner, inner_name == name)
            for name in followed
            for inner_name, inner in network.get_submodule(name).named_modules(prefix=name)
        ]
        self._partial = [(name, network.get_submodule(name), whole) for name, whole in partial.items()]
        paths = {name.rsplit(".", count)[0] for name in partial for count in range(1, name.count(".") + 1)}
        self._owners = [(name, network.get_submodule(name)) for name in sorted(paths | ({""} if partial else set()))]
        self._remember()

    def refuse(self) -> None:
        """Look whether all is as it was.

        Raises:
            ModelError: something was changed that would have no effect, or a wrong one; says what.
        """
        try:
            if not self._noticed and self._now() == self._known and all(map(operator.eq, self._children, self._known_children)):
                return
        except (KeyError, RuntimeError, ValueError):  # an attribute is gone; tensors and arrays have no bool
            pass
        for label, value in self._facts().items():
            before = self._known_facts.get(label)
            if alike(before, value) or (label in self._replaced and self._replaceable(value)):
                continue
            raise ModelError(
                f"{label} was changed after the network was tiled: it was {reprlib.repr(before)}, and is "
                f"{reprlib.repr(value)}. Ranks share the units there, so this has no effect or a wrong one. Change it before "
                "tatami.tile; keep a number that changes while training in a buffer (register_buffer), which is read in every "
                "pass; or give replicas of one rank (layout=...)"
            )
        for name, module, whole in self._partial:
            if any(vars(module)[kind] for kind in _HOOKS if kind not in whole):
                raise ModelError(
                    f"{name} has got a hook since the network was tiled. Ranks share the units there, so it would be called "
                    "with some of them only: register it before tatami.tile, or give replicas of one rank (layout=...)"
                )
        self._remember()

    def _remember(self) -> None:
        """What is compared in every pass: whole lists, by identity first."""
        modules = [(vars(module), _settings_of(module)) for _, module, _ in self._followed]
        owned = modules + [(vars(each), list(vars(each))) for each in self._objects().values()]
        owned += [(vars(each), names) for each, names in self._classes().items()]
        self._takes = [operator.itemgetter(*names, names[0]) for _, names in owned if names]
        self._from: list[Mapping[str, Any]] = [held for held, names in owned if names]
        self._functions = [(vars(owner), key) for _, owner in self._owners for key in _functions_of(owner)]
        tensors = [
            value
            for get, held in zip(self._takes, self._from, strict=True)
            for value in get(held)
            if isinstance(value, torch.Tensor)
        ]
        self._tensors = [each for each in tensors if not each.is_inference()]
        partial = [vars(module) for _, module, _ in self._partial]
        every = [
            self._noticing(held, key) for held in [*partial, *(held for held, _ in modules)] for key in (*_HOOKS, "_modules")
        ]
        self._sized = [each for each in every if each]
        self._noticed.clear()
        owners = [module for _, module, _ in self._followed] + [owner for _, owner in self._owners]
        self._children = [owner._modules for owner in owners if owner._modules]
        self._known_children = list(map(dict, self._children))
        self._known = _kept(self._now())
        self._known_facts = self._facts()

    def _noticing(self, held: dict[str, Any], key: str) -> Any:
        """The dict of a module under `key`; where it is empty, with one in its place that notices."""
        if not held[key] and type(held[key]) is not _Noticing:
            held[key] = _Noticing(self._noticed)
        return held[key]

    def _now(self) -> Any:
        return (
            list(map(len, self._sized)),
            list(map(operator.call, self._takes, self._from)),
            [held[key] for held, key in self._functions],
            [each._version for each in self._tensors],
        )

    def _facts(self) -> dict[str, Any]:
        """The same with what each is, for an error."""
        found: dict[str, Any] = {}
        for name, module, is_root in self._followed:
            label = name or "the network"
            found |= {f"{label}.{key}": _kept(vars(module)[key]) for key in _settings_of(module) if key in vars(module)}
            for key in _settings_of(module):
                value = vars(module).get(key)
                if isinstance(value, torch.Tensor):
                    found[f"the numbers in {label}.{key}"] = value.detach().clone()
            found |= {f"layer {name}.{own}".replace(" .", " "): child for own, child in module._modules.items()}
            if not is_root:
                found[f"the forward of {label}"] = vars(module).get("forward")
                found[f"the list of hooks of {label}"] = [hook for key in _HOOKS for hook in vars(module)[key].values()]
        found |= {f"{name}.{key}": _kept(value) for name, each in self._objects().items() for key, value in vars(each).items()}
        for kind, names in self._classes().items():
            found |= {f"{kind.__name__}.{key}": _kept(vars(kind)[key]) for key in names}
        for name, module, _ in [*self._followed, *self._partial]:
            label = f"the list of parameters and buffers of {name or 'the network'}"
            found[label] = [*module._parameters, *module._buffers]
        self._replaced = set[str]()
        for name, _, _ in self._partial:
            path, _, own = name.rpartition(".")
            owner = next(owner for lead, owner in self._owners if lead == path)
            found[f"layer {name}"] = owner._modules.get(own)
            self._replaced.add(f"layer {name}")
        for name, owner in self._owners:
            for key in _functions_of(owner):
                found[f"{name or 'the network'}.{key}"] = vars(owner)[key]
                self._replaced.add(f"{name or 'the network'}.{key}")
        return found

    def _classes(self) -> dict[type, list[str]]:
        """The classes of followed modules, but for torch's, and their attributes that are numbers, texts and collections."""
        known = dict.fromkeys(each for _, module, _ in self._followed for each in type(module).__mro__)
        return {
            each: [key for key, value in vars(each).items() if isinstance(value, _PLAIN) and not key.startswith("__")]
            for each in known
            if not each.__module__.startswith(("torch.", "builtins"))
        }

    def _objects(self) -> dict[str, Any]:
        """What modules hold that has attributes itself, such as a configuration."""
        found: dict[int, tuple[str, Any]] = {}
        for name, module, _ in self._followed:
            for key in _settings_of(module):
                value = vars(module).get(key)
                if hasattr(value, "__dict__") and not callable(value) and not isinstance(value, torch.Tensor):
                    found.setdefault(id(value), (f"{name or 'the network'}.{key}", value))
        return dict(found.values())


def _settings_of(module: nn.Module) -> list[str]:
    free = _FREE | _READ_BY_PROGRAMS if isinstance(module, nn.modules.batchnorm._BatchNorm) else _FREE
    return [name for name in vars(module) if name not in NOT_ATTRIBUTES and name not in free and "_hooks" not in name]


def _functions_of(module: nn.Module) -> list[str]:
    """Attributes that are functions, such as an activation."""
    return [name for name, value in vars(module).items() if name != "forward" and callable(value)]


def _kept(value: Any) -> Any:
    """A copy of lists, tuples, dicts and sets, which holds the same objects."""
    if type(value) in (list, tuple):
        return type(value)(map(_kept, value))
    if type(value) is dict:
        return {key: _kept(each) for key, each in value.items()}
    return set(value) if type(value) is set else value
