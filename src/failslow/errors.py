"""Every exception failslow raises on purpose.

FailslowError                  base: the message is one line for a user: what, where, what to do
├── CaptureError               a ring of collectives cannot be made or read
├── ConfigError                a setting is out of range (value, limit, remedy)
├── InjectError                a fault cannot be injected or undone
├── InputError                 a file cannot be used as training telemetry
│   ├── UnknownFormatError     no reader knows the file
│   └── MissingDependencyError the format needs an optional library
├── JournalError               a journal cannot be read or written
├── OutputError                a report cannot be written
├── PlanError                  what is asked of a planner cannot be
├── ProbeError                 a campaign of probes, or its store, cannot be run or read
└── TransportError             a message bus cannot be used as asked
    └── MessageTooLargeError   a message is over the size limit
"""

from __future__ import annotations

__all__ = [
    "CaptureError",
    "ConfigError",
    "FailslowError",
    "InjectError",
    "InputError",
    "JournalError",
    "MessageTooLargeError",
    "MissingDependencyError",
    "MoveError",
    "OutputError",
    "PlanError",
    "ProbeError",
    "TransportError",
    "UnknownFormatError",
]


class FailslowError(Exception):
    """Base of all deliberate errors; the CLI prints it as one line and exits with 1."""


class CaptureError(FailslowError):
    """A ring of collectives cannot be made or read."""


class ConfigError(FailslowError):
    """A setting is out of range."""


class InjectError(FailslowError):
    """A fault cannot be injected, or cannot be undone."""


class InputError(FailslowError):
    """A file cannot be used as training telemetry."""


class UnknownFormatError(InputError):
    """No reader recognises the file."""


class MissingDependencyError(InputError):
    """The input needs a library that is an optional extra."""


class JournalError(FailslowError):
    """A journal cannot be read or written."""


class MoveError(FailslowError):
    """The workers' state cannot change places; every worker still has the state it had."""

    def __init__(self, message: str, *, refused: bool = False) -> None:
        super().__init__(message)
        self.refused = refused
        """Nothing was moved, and nothing would be by trying again."""


class LabError(FailslowError):
    """The nodes on one machine cannot be made, or what runs on them failed."""


class OutputError(FailslowError):
    """A report cannot be written."""


class PlanError(FailslowError):
    """What is asked of a planner cannot be: infeasible bounds, impossible costs."""


class ProbeError(FailslowError):
    """A campaign of probes cannot be run, or its store cannot be read or written."""


class TransportError(FailslowError):
    """A message bus cannot be used as asked."""


class MessageTooLargeError(TransportError):
    """A message is over the size limit."""
