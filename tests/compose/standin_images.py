"""Base images for a network without a registry: a small Debian, tagged as compose file and Dockerfile say.

The servers in them are the real ones, from packages; Jaeger, which no package carries, is played by
`trace_collector.py`.
"""

import json
import os
import pwd
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import trace_collector
from docker_engine import DockerEngine, run

from services.cli.pool import nats_server_argv

INCLUDED = ("ca-certificates", "python3-dev", "python3-venv", "redis-server", "prometheus", "wget")
LEFT_OUT = ("./var/cache/apt/*.bin", "*.deb", "./usr/share/doc", "./usr/share/man", "./usr/share/locale")
CA_BUNDLE = "/etc/ssl/certs/ca-certificates.crt"
ROOT_IMAGE = "festina-standin"


def make_standins(engine: DockerEngine, folder: Path, images: dict[str, str]) -> None:
    """Make a stand-in for each of `images`: nats, redis, prometheus, jaeger and python -> full name."""
    root = folder / "root"
    run(
        ["debootstrap", "--variant=minbase", f"--include={','.join(INCLUDED)}", "bookworm", str(root)],
        within_s=300,
    )
    _own_folder(root, "data", "redis")
    _own_folder(root, "prometheus", "nobody")
    _import(engine, root)
    shutil.rmtree(root)
    nats = nats_server_argv(0)[0]
    _tag(engine, images["nats"], files={nats: "/usr/local/bin/nats-server"})
    _tag(engine, images["redis"])
    _tag(engine, images["prometheus"], changes=['ENTRYPOINT ["/usr/bin/prometheus"]'])
    jaeger = _jaeger(folder / "jaeger")
    _tag(
        engine,
        images["jaeger"],
        files={str(jaeger): "/jaeger"},
        changes=['ENTRYPOINT ["python3", "/jaeger/trace_collector.py"]'],
    )
    bundle = os.environ.get("PIP_CERT") or os.environ.get("SSL_CERT_FILE") or CA_BUNDLE
    _tag(
        engine,
        images["python"],
        files={bundle: CA_BUNDLE},
        changes=[f"ENV PIP_CERT={CA_BUNDLE} SSL_CERT_FILE={CA_BUNDLE}", *_pip_settings()],
    )


def _own_folder(root: Path, name: str, user: str) -> None:
    """Make a top-level folder that belongs to a user of that system: a volume mounted there inherits it."""
    passwd = (root / "etc/passwd").read_text()
    found = re.search(rf"^{user}:[^:]*:(\d+):(\d+)", passwd, re.MULTILINE)
    uid, gid = map(int, found.groups()) if found else pwd.getpwnam(user)[2:4]
    (root / name).mkdir()
    os.chown(root / name, uid, gid)


def _import(engine: DockerEngine, root: Path) -> None:
    pack = ["tar", "-C", str(root), *(f"--exclude={path}" for path in LEFT_OUT), "-c", "."]
    with subprocess.Popen(pack, stdout=subprocess.PIPE) as tar:
        subprocess.run(
            ["docker", "import", "-", ROOT_IMAGE], env=engine.env, stdin=tar.stdout, check=True, timeout=120
        )


def _tag(
    engine: DockerEngine, image: str, files: dict[str, str] | None = None, changes: list[str] | None = None
) -> None:
    container = engine.run("create", ROOT_IMAGE, "true").strip()
    for source, target in (files or {}).items():
        engine.run("cp", "--follow-link", source, f"{container}:{target}")
    options = [option for change in ['CMD ["bash"]', *(changes or [])] for option in ("--change", change)]
    engine.run("commit", *options, container, image)
    engine.run("rm", container)


def _pip_settings() -> list[str]:
    """Return what pip is told by this machine's environment that an image needs to be told as well."""
    names = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_TRUSTED_HOST")
    return [f"ENV {name}={json.dumps(os.environ[name])}" for name in names if os.environ.get(name)]


def _jaeger(folder: Path) -> Path:
    """Gather the collector and the one package that it needs."""
    package = f"opentelemetry-proto=={version('opentelemetry-proto')}"
    run([sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder), package])
    shutil.copy(trace_collector.__file__, folder)
    return folder
