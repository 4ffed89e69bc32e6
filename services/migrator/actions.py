"""What a migrator's core orders of its shell, and what it hears back: stages, and their way to other hosts.

A stage holds the KV of one moving request in shared memory; both engines of one host map it. Between hosts
its blocks are sent to the other migrator, which has a stage of the same name.
"""

from shared.events import Action, Event


class OpenStage(Action):
    """Make a stage with room for so many blocks; `StageOpened` tells when it is there."""

    move_id: str
    stage: str
    block_bytes: int
    blocks: int


class StageOpened(Event):
    """There is a stage now; or none, for a `reason`."""

    move_id: str
    reason: str = ""


class SendChunk(Action):
    """Send blocks of a stage to the migrator of another host; `ChunkSent` tells when it has them."""

    move_id: str
    stage: str
    host: str
    first_block: int
    blocks: int


class ChunkSent(Event):
    """What was sent by `SendChunk` has arrived whole; or not, for a `reason`."""

    move_id: str
    n_bytes: int = 0
    took_ms: float = 0.0
    reason: str = ""


class CloseStage(Action):
    """Free a stage; on the destination's host as well, if that is another (`host` not empty)."""

    stage: str
    host: str


class KeepWeights(Action):
    """Read a folder of weights into the host's memory, if it is not there yet, and keep it there."""

    folder: str


class DropWeights(Action):
    """Give back the host memory that a folder of weights takes."""

    folder: str
