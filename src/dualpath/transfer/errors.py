"""What can go wrong in the room, by kind of consequence."""

from __future__ import annotations


class PoolError(RuntimeError):
    """Buffer room was not granted."""


class PoolTooSmall(PoolError):
    """The request is larger than the whole buffer: no waiting and no retry can help."""


class PoolTimeout(PoolError):
    """No room within the time given: trying again later may help."""


class TransferError(RuntimeError):
    """A transfer did not complete; the bytes at its destination are undefined."""


class TransferTimeout(TransferError):
    """Its time was over first. It may still be under way: see ``Transfer.settled``."""


class PeerLost(TransferError):
    """The peer is not known here, was removed, or its connection broke."""


class TransferFailed(TransferError):
    """The transfer library gave the transfer up for another reason."""


class AgentClosed(TransferError):
    """This side's agent was closed while the transfer was waiting or under way."""


class AgentSetupError(RuntimeError):
    """The transfer agent cannot work with these settings on this machine."""


class NixlMissing(AgentSetupError):
    """No NIXL package can be imported."""
