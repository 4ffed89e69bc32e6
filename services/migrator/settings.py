"""Every number of the migrator that can be chosen."""

from shared.model import Struct
from shared.settings import require_positive


class MigratorSettings(Struct):
    """Settings of one migrator. Raises ConfigError for a value that makes no sense.

    Args:
        step_timeout_ms: a step of a move that is not answered within this time ends the move. All steps
            together must fit into the time for which a source holds a request (`move_ttl_ms` there).
        commit_tries: how often the destination is told to start a request before its silence ends the move.
        max_moves: moves under way at once.
        max_waiting: moves that wait for one of those to end; more are refused.
        max_remembered: ended moves remembered, so that a repeated order is not carried out twice.
    """

    step_timeout_ms: float = 1_000.0
    commit_tries: int = 2
    max_moves: int = 64
    max_waiting: int = 1_024
    max_remembered: int = 4_096

    def __post_init__(self) -> None:
        require_positive(self, self.__struct_fields__)
