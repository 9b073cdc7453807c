"""Kinds of traced operations, and who takes part in one.

In: the name of a kind, as traces have it ("grads-reduce-scatter"). Out: what is known of it.
"""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

__all__ = [
    "BACKWARD",
    "CLIP",
    "EMBEDDING",
    "FORWARD",
    "WAYS",
    "Way",
    "is_communication",
    "is_peer_to_peer",
    "is_replica_sync",
]

Way: TypeAlias = Literal["forward", "backward"]

FORWARD: Final = "forward-compute"
BACKWARD: Final = "backward-compute"
EMBEDDING: Final = "embedding-grads-all-reduce"
"""First and last stage of a replica take part."""
CLIP: Final = "optimizer-clip-main-grad"
"""Every worker takes part."""
WAYS: Final[tuple[Way, Way]] = ("forward", "backward")


def is_peer_to_peer(kind: str) -> bool:
    """Whether an operation of this kind passes activations or their gradients on."""
    return kind in {f"{way}-{end}" for way in WAYS for end in ("send", "recv")}


def is_replica_sync(kind: str) -> bool:
    """Whether all replicas of a stage take part in an operation of this kind."""
    return kind.startswith(("params-", "grads-", "separate-grads-"))


def is_communication(kind: str) -> bool:
    """Whether the network, not a device, decides how long an operation of this kind takes."""
    return (
        is_peer_to_peer(kind)
        or is_replica_sync(kind)
        or kind == CLIP
        or any(word in kind for word in ("reduce", "gather", "scatter", "broadcast", "all-to-all"))
    )
