"""What can be chosen of the migrator."""

from shared.model import Struct
from shared.settings import require_positive


class MigratorSettings(Struct):
    """Settings of one migrator. Raises ConfigError for a value that makes no sense.

    Args:
        step_timeout_ms: a step of a move that is not answered within this time ends the move. All steps
            together must fit into the time for which a source holds a request (`move_ttl_ms` there).
        commit_tries: how often the destination is told to start a request before its silence ends the move.
        credit_tries: how often the destination is asked again, after a step's time each, for more memory for
            a running request before the move ends.
        chunk_bytes: KV copied at a time while its request goes on; once no more than this is left, the
            request is held, and the rest is copied.
        spare_blocks: KV blocks that a stage has room for beyond what its request has: it grows meanwhile.
        import_timeout_ms: a stage of which the destination says nothing for this long after the commit is
            freed.
        host_bytes_s: bandwidth of a copy of KV on this host before one has been measured.
        network_bytes_s: the same to another host; 0: KV does not travel there, contexts are computed again.
        max_moves: moves under way at once.
        max_waiting: moves that wait for one of those to end; more are refused.
        weight_cache_bytes: host memory for weights of models that were loaded (an eighth of what a host with
            eight GPUs has); 0 keeps none, and nothing is told of any.
        max_remembered: ended moves remembered, so that a repeated order is not carried out twice.
    """

    step_timeout_ms: float = 1_000.0
    commit_tries: int = 2
    credit_tries: int = 5
    chunk_bytes: int = 128 << 20
    spare_blocks: int = 16
    import_timeout_ms: float = 30_000.0
    host_bytes_s: float = 20e9
    network_bytes_s: float = 0.0
    max_moves: int = 64
    max_waiting: int = 1_024
    weight_cache_bytes: int = 256 << 30
    max_remembered: int = 4_096

    def __post_init__(self) -> None:
        may_be_0 = ("network_bytes_s", "weight_cache_bytes")
        require_positive(self, tuple(name for name in self.__struct_fields__ if name not in may_be_0))


class LinkSettings(Struct):
    """How a migrator reaches those of other hosts, and they it (section ``link``).

    Args:
        host, port: where it listens for KV of other hosts; port 0 is any that is free.
        advertise: the ``host:port`` by which others reach it; empty: what it listens on.
        secret: what all migrators of a pool know, and nobody else; empty: none is listened to, and KV does
            not leave its host.
        max_links: connections at once, in each direction.
        chunk_bytes: about how much is sent before the next checksum.
        window_chunks: chunks on their way that the other side has not confirmed.
        timeout_s: silence of the other side after which it counts as dead.
        idle_s: longest that a stage which has come is kept without further word of its sender.
    """

    host: str = "127.0.0.1"
    port: int = 0
    advertise: str = ""
    secret: str = ""
    max_links: int = 128
    chunk_bytes: int = 1 << 20
    window_chunks: int = 4
    timeout_s: float = 5.0
    idle_s: float = 60.0

    def __post_init__(self) -> None:
        texts = ("host", "port", "advertise", "secret")
        require_positive(self, tuple(name for name in self.__struct_fields__ if name not in texts))
