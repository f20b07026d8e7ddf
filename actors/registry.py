"""What the user registered: sorted into modules, optimizers, schedulers and scalers, and updated as one.

Used by `actors.session` only. All of it is state (`checkpoint.state.RegisteredState`); this module adds what happens
to it at a commit. No collectives and no membership here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from everstep.checkpoint.state import RegisteredState
from everstep.errors import LoopError, StateError


class Registry:
    """Filled by `add`, closed by `seal`."""

    def __init__(self) -> None:
        self._objects: dict[str, Any] = {}
        self._modules: dict[str, nn.Module] = {}
        self._optimizers: list[torch.optim.Optimizer] = []
        self._schedulers: list[Any] = []
        self._scaler: torch.amp.GradScaler | None = None
        self._state: RegisteredState | None = None

    @property
    def state(self) -> RegisteredState:
        """The registered objects as state."""
        assert self._state is not None
        return self._state

    def add(self, objects: Mapping[str, Any]) -> None:
        """Take objects; lists and tuples of them become `name.0`, `name.1`, ..."""
        for name, thing in objects.items():
            if isinstance(thing, list | tuple):
                self.add({f"{name}.{i}": item for i, item in enumerate(thing)})
                continue
            if name in self._objects:
                raise StateError(
                    f"register({name}=...): {name!r} is registered already; give it another name"
                )
            RegisteredState({name: thing})  # raises for what cannot be state, naming it
            self._objects[name] = thing
            self._sort(name, thing)

    def _sort(self, name: str, thing: Any) -> None:
        if isinstance(thing, nn.Module):
            self._modules[name] = thing
        elif isinstance(thing, torch.optim.LBFGS):
            raise StateError(
                f"register({name}=...): LBFGS needs a closure per step, which an elastic step has not"
            )
        elif isinstance(thing, torch.optim.Optimizer):
            self._optimizers.append(thing)
        elif isinstance(thing, torch.optim.lr_scheduler.ReduceLROnPlateau):
            pass  # state, but only the user knows what to step it with
        elif isinstance(thing, torch.optim.lr_scheduler.LRScheduler):
            self._schedulers.append(thing)
        elif isinstance(thing, torch.amp.GradScaler):
            self._scaler = thing

    def add_internal(self, **objects: Any) -> None:
        """The project's own state beside the user's."""
        self._objects.update(objects)
        self._state = RegisteredState(self._objects)

    def seal(self) -> None:
        """Raises LoopError if nothing can be trained, or an optimizer updates what is not registered."""
        if not self._modules:
            raise LoopError(
                "nothing to train: call run.register(model=..., optimizer=...) before run.steps()"
            )
        known = {id(p) for m in self._modules.values() for p in m.parameters()}
        for optimizer in self._optimizers:
            if any(id(p) not in known for group in optimizer.param_groups for p in group["params"]):
                raise LoopError(
                    f"a registered {type(optimizer).__name__} updates parameters of a module that is not registered: "
                    "their gradients would not be reduced. Register that module too"
                )
        self._state = RegisteredState(self._objects)

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """All parameters of all modules, tied ones once, in order of registration."""
        seen: dict[int, tuple[str, nn.Parameter]] = {}
        for name, module in self._modules.items():
            for key, parameter in module.named_parameters():
                seen.setdefault(id(parameter), (f"{name}.{key}", parameter))
        return list(seen.values())

    def named_buffers(self) -> list[tuple[str, Tensor]]:
        """All buffers of all modules, shared ones once."""
        seen: dict[int, tuple[str, Tensor]] = {}
        for name, module in self._modules.items():
            for key, buffer in module.named_buffers():
                seen.setdefault(id(buffer), (f"{name}.{key}", buffer))
        return list(seen.values())

    def buffer_overrides(self, committed: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
        """Committed buffers by module: in mid-step the live ones hold what a shard's forward left in them."""
        overrides: dict[str, dict[str, Tensor]] = {}
        for full, tensor in committed.items():
            for name in self._modules:
                if full.startswith(f"{name}."):
                    overrides.setdefault(name, {})[full[len(name) + 1 :]] = tensor
        return overrides

    def steady_tensors(self) -> list[Tensor]:
        """Tensors that change in `update` alone: parameters, and what the optimizers keep for them."""
        steady: list[Tensor] = [parameter.detach() for _, parameter in self.named_parameters()]
        for optimizer in self._optimizers:
            for kept in optimizer.state.values():
                steady += [value for value in kept.values() if isinstance(value, Tensor)]
        return steady

    def scale_loss(self, loss: Tensor) -> Tensor:
        """The loss as it goes into backward."""
        return loss if self._scaler is None else self._scaler.scale(loss)

    def after_load(self) -> None:
        """State was loaded from a peer: gradients of another life are void."""
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)

    def update(self, *, skip: bool, clip_norm: float | None, clip_value: float | None) -> None:
        """Clip, step everything, and drop the gradients. They are the same on all replicas, so everything is."""
        if not skip:
            parameters = [p for _, p in self.named_parameters() if p.grad is not None]
            if self._scaler is not None:
                for optimizer in self._optimizers:
                    self._scaler.unscale_(optimizer)
            if clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(parameters, clip_norm)
            if clip_value is not None:
                torch.nn.utils.clip_grad_value_(parameters, clip_value)
            for optimizer in self._optimizers:
                if self._scaler is None:
                    optimizer.step()
                else:
                    self._scaler.step(optimizer)
            if self._scaler is not None:
                self._scaler.update()
        for scheduler in self._schedulers:
            scheduler.step()
        for _, parameter in self.named_parameters():
            parameter.grad = None
