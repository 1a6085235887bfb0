"""Hooks that users register on parameters see the gradient over the global batch, as they would on one machine.

Torch calls them when the gradient of this rank's samples is complete, before anything is summed. So a parameter gets dicts of
hooks in which torch finds the engine's alone; what users register is kept apart, and called when the sum is there.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

_OWN = -1
"""Key of the engine's hook; torch counts those of users from 0 on."""


class _Apart(dict[int, Any]):
    """A dict of hooks, in which torch finds `own` in place of those that are set by `[]`, once there are any."""

    def __init__(self, own: Callable[..., Any], *, users: Mapping[int, Callable[..., Any]]) -> None:
        super().__init__()
        self.users: dict[int, Callable[..., Any]] = {}
        self._own = own
        for key, hook in users.items():
            self[key] = hook

    def __setitem__(self, key: int, hook: Callable[..., Any]) -> None:
        self.users[key] = hook
        self.enter()

    def __delitem__(self, key: int) -> None:  # by the handle of the hook
        del self.users[key]

    def __contains__(self, key: object) -> bool:
        return key in self.users

    def enter(self) -> None:
        """Let torch call `own`."""
        super().__setitem__(_OWN, self._own)

    def leave(self) -> None:
        """Let torch find nothing until `enter`."""
        self.clear()


class ParameterHooks:
    """The hooks of one parameter.

    Where an engine watches the parameter already, as in DataParallel over replicas that are tiled, the new one is among the
    users of that one: it sees the sum over the ranks of a replica.

    Args:
        parameter: whose hooks they are; torch calls `hook(parameter, gradient)` from now on.
        hook: of the engine; returns NotImplemented when the engine is gone.

    Attributes:
        users: hooks of the gradient of a pass.
        are_apart: whether users' hooks wait for the sum.
    """

    def __init__(self, parameter: nn.Parameter, hook: Callable[[nn.Parameter, torch.Tensor | None], Any]) -> None:
        given: Any = parameter
        self._parameter, self._hook = weakref.ref(parameter), hook
        self.are_apart = False
        self._joined: list[_Apart] = []
        self._entered: list[_Apart] = []
        self.users: dict[int, Callable[..., Any]] = {}
        self._after: dict[int, Callable[..., Any]] = {}
        if isinstance(given._backward_hooks, _Apart):
            # As `register_hook`, which refuses frozen parameters.
            self._joined = [given._backward_hooks, given._post_accumulate_grad_hooks]
            for hooks, own in zip(self._joined, (self._call, self._call_after), strict=True):
                hooks[-id(self)] = own
            return
        before = _Apart(self._call, users=given._backward_hooks or {})
        after = _Apart(self._call_after, users=given._post_accumulate_grad_hooks or {})
        before.enter()
        given._backward_hooks, given._post_accumulate_grad_hooks = before, after
        self.users, self._after, self._entered = before.users, after.users, [before]

    @property
    def are_joined(self) -> bool:
        """Whether another engine watches the parameter, too."""
        return bool(self._joined) or any(key < 0 for key in self.users)

    @property
    def is_alone(self) -> bool:
        """Whether the engine has the only hook of this parameter."""
        return not (self._joined or self.users or self._after)

    def pause(self) -> None:
        """Have the engine's hook not called, until `resume` or a user's hook comes."""
        for hooks in self._entered:
            hooks.leave()

    def resume(self) -> None:
        """Have it called again."""
        for hooks in self._entered:
            hooks.enter()

    def run(self, grad: torch.Tensor) -> torch.Tensor:
        """The gradient as the users' hooks make it."""
        for hook in list(self.users.values()):
            changed = hook(grad)
            grad = grad if changed is None else changed
        return grad

    def run_after(self, parameter: nn.Parameter) -> None:
        """`.grad` is what it is to be."""
        for hook in list(self._after.values()):
            hook(parameter)

    def close(self) -> None:
        """The engine is gone."""
        self.are_apart = False
        for hooks in self._joined:
            del hooks[-id(self)]
        self._joined = []

    def leave(self) -> None:
        """Leave the parameter as it was, with the hooks of its users alone."""
        given: Any = self._parameter()
        self.close()
        if given is not None and isinstance(given._backward_hooks, _Apart) and given._backward_hooks.users is self.users:
            given._backward_hooks, given._post_accumulate_grad_hooks = OrderedDict(self.users), OrderedDict(self._after)

    def _call(self, grad: torch.Tensor | None) -> torch.Tensor | None:
        here = self._parameter()
        result: Any = NotImplemented if here is None else self._hook(here, grad)
        if result is NotImplemented:
            self.are_apart = False
            return grad if grad is None else self.run(grad)
        given: torch.Tensor | None = result
        return given

    def _call_after(self, parameter: nn.Parameter) -> None:
        if not self.are_apart:
            self.run_after(parameter)


def copy_hooks(given: nn.Parameter, own: nn.Parameter) -> None:
    """Give a parameter the hooks of another one."""
    for hook in (given._backward_hooks or {}).values():
        own.register_hook(hook)  # type: ignore[no-untyped-call]
    for hook in (getattr(given, "_post_accumulate_grad_hooks", None) or {}).values():
        own.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
