"""Hosts of their own on one machine: network namespaces, each with one link to a bridge of the root's."""

import os
import shutil
import subprocess
import uuid


def run(*argv: str) -> None:
    done = subprocess.run(argv, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(argv)}: {done.stderr}"


def why_not() -> str:
    """Why namespaces cannot be used here; empty if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "iproute2 is not installed"
    name = f"fp{uuid.uuid4().hex[:8]}"
    tries = (("link", "add", name, "type", "bridge"), ("link", "del", name), ("netns", "add", name))
    for arguments in (*tries, ("netns", "del", name)):
        done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
        if done.returncode:
            return f"ip {' '.join(arguments)}: {done.stderr.strip()}"
    return ""


class Network:
    """A bridge, and namespaces joined to it, on a /24 that is used for nothing else."""

    def __init__(self, prefix: str = "10.213.77") -> None:
        self._tag = uuid.uuid4().hex[:6]
        self._bridge = f"fb{self._tag}"
        self.prefix = prefix
        self.address = f"{prefix}.1"
        self._hosts: list[str] = []
        run("ip", "link", "add", self._bridge, "type", "bridge")
        run("ip", "addr", "add", f"{self.address}/24", "dev", self._bridge)
        run("ip", "link", "set", self._bridge, "up")

    def add(self) -> int:
        """Add a host; returns its number."""
        number = len(self._hosts)
        name, outer, inner = f"fn{self._tag}{number}", f"fv{self._tag}{number}", f"fi{self._tag}{number}"
        run("ip", "netns", "add", name)
        self._hosts.append(name)
        run("ip", "link", "add", outer, "type", "veth", "peer", "name", inner, "netns", name)
        run("ip", "link", "set", outer, "master", self._bridge, "up")
        for command in (f"addr add {self.address_of(number)}/24 dev {inner}", f"link set {inner} up"):
            run("ip", "-n", name, *command.split())
        run("ip", "-n", name, "link", "set", "lo", "up")
        return number

    def address_of(self, number: int) -> str:
        return f"{self.prefix}.{11 + number}"

    def argv(self, number: int, *argv: str) -> list[str]:
        """The command line that runs something on a host."""
        return ["ip", "netns", "exec", self._hosts[number], *argv]

    def link(self, number: int, up: bool) -> None:
        """Plug a host in, or pull its cable out."""
        run("ip", "link", "set", f"fv{self._tag}{number}", "up" if up else "down")

    def close(self) -> None:
        for name in self._hosts:
            run("ip", "netns", "del", name)
        run("ip", "link", "del", self._bridge)
