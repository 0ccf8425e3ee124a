"""Servers that start and end together: replicas of one target's server, or those of several configurations."""

from dataclasses import dataclass

from stages.serving.server import ServerProcess, read_log_tail, start_servers, stop_servers


@dataclass
class ServerGroup:
    """Servers that answer inside a `with` block. Entering raises ValueError where one cannot be started, and stops the others."""

    servers: list[ServerProcess]

    def __enter__(self) -> "ServerGroup":
        start_servers(self.servers)
        return self

    def __exit__(self, *_: object) -> None:
        stop_servers(self.servers)

    @property
    def base_urls(self) -> list[str]:
        return [server.base_url for server in self.servers]

    @property
    def restarted(self) -> int:
        return sum(server.restarted for server in self.servers)

    def check_alive(self) -> None:
        """Restart each server that has ended. Raises ValueError as `ServerProcess.check_alive`."""
        for server in self.servers:
            server.check_alive()

    def read_log_tails(self) -> str:
        return "".join(
            f"\nThe last lines of its log, {server.log}:\n{read_log_tail(server.log)}"
            for server in self.servers
            if server.log.exists()
        )
