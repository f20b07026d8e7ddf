"""The one exception family of Everstep. Everything the project raises on purpose is here.

EverstepError
├── UserError                 the caller's input or code; never retried
│   ├── ConfigError           a field, its value, and what would be right
│   ├── RunNameTaken          a live run of that name has a live driver
│   ├── RunNotFound           no live run of that name on this cluster
│   ├── TrainingError         an exception left the user's train function; carries its traceback
│   ├── LoopError             the loop broke the session's rules (forgot `commit`, `register` after `steps`, ...)
│   ├── StateMismatch         a replica registered other names, shapes or dtypes than its peers
│   ├── StateError            a registered object, or what its state_dict holds, cannot be state
│   └── NonFiniteLoss         loss or gradient was NaN or infinite and the policy says stop
├── PeerError                 another replica's fault; the protocol handles these, users rarely see them
│   ├── GroupBroken           a collective failed or was aborted
│   ├── Fenced                this replica's generation is over
│   └── TransferFailed        state could not be fetched, or did not match its hash
├── InfrastructureError       machines, network, cluster
│   ├── BudgetExhausted       more failures of one class than the run may absorb
│   ├── ControllerUnreachable the controller, or the whole cluster, did not answer within the deadline
│   ├── RunStopped            the run was stopped by command before its last step
│   └── CannotStart           replicas could not be started
└── InternalError             a bug of ours; please report it with the run's events
    └── IllegalEvent          the controller's core met an event its table forbids
"""

from __future__ import annotations


class EverstepError(Exception):
    """Base of all. The message says what happened, to whom, and what to do. Picklable through Ray."""


class UserError(EverstepError):
    """The caller's input or code is wrong; the run fails fast and nothing is retried."""


class ConfigError(UserError):
    """A configuration field has a value that cannot work."""


class RunNameTaken(UserError):
    """A live run of this name exists on the cluster."""


class RunNotFound(UserError):
    """No live run of this name exists on the cluster."""


class TrainingError(UserError):
    """An exception left the user's train function. `args[0]` starts with the user's own traceback."""


class LoopError(UserError):
    """The training loop broke a rule of the session."""


class StateMismatch(UserError):
    """A replica's registered state has another layout than its peers'."""


class StateError(UserError):
    """A registered object, or a value inside its state_dict, cannot be carried as state."""


class NonFiniteLoss(UserError):
    """The loss or a gradient is NaN or infinite, and the policy is to stop."""


class PeerError(EverstepError):
    """The fault of another replica."""


class GroupBroken(PeerError):
    """A collective of the current generation failed or was aborted."""


class Fenced(PeerError):
    """This replica is no longer part of the run's current generation."""


class TransferFailed(PeerError):
    """State could not be fetched from any source, or failed its hash."""


class InfrastructureError(EverstepError):
    """Machines, network or cluster."""


class BudgetExhausted(InfrastructureError):
    """More failures of one class than the run may absorb."""


class ControllerUnreachable(InfrastructureError):
    """The controller did not answer within its deadline, or no Ray cluster was found to ask."""


class RunStopped(InfrastructureError):
    """The run was stopped by command before its last step."""


class CannotStart(InfrastructureError):
    """Replicas could not be started."""


class InternalError(EverstepError):
    """A bug of ours."""


class IllegalEvent(InternalError):
    """The controller's core met an event that its transition table forbids."""
