"""The compose file and what it mounts, held to their promises without Docker."""

import ast
import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from services.consolidator.settings import ConsolidatorSettings
from services.gateway.settings import GatewaySettings
from services.global_sched.settings import GlobalSettings
from services.local_sched.clock_guard import GuardSettings
from services.local_sched.main import DeviceSettings, device_for
from services.local_sched.settings import LocalSettings
from services.migrator.settings import LinkSettings, MigratorSettings
from shared.config import Common, load
from shared.stage import StageSettings

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
TEXT = (ROOT / "compose.yaml").read_text()
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load(TEXT)["services"]
OURS = {name: s for name, s in SERVICES.items() if s["image"].startswith("festina")}
JOBS = {name for name, service in SERVICES.items() if service["restart"] == "on-failure"}
GUARD = "gpu-clocks"
SECTIONS: dict[str, type[msgspec.Struct]] = {
    "": Common,
    "gateway": GatewaySettings,
    "global_sched": GlobalSettings,
    "local_sched": LocalSettings,
    "device": DeviceSettings,
    "clock_guard": GuardSettings,
    "consolidator": ConsolidatorSettings,
    "migrator": MigratorSettings,
    "link": LinkSettings,
    "stages": StageSettings,
}
each_service = pytest.mark.parametrize("name", SERVICES)


def variables() -> set[str]:
    """Every FESTINA_ variable that a service or the command line reads."""
    found = set(re.findall(r'envvar="(FESTINA_\w+)"', (ROOT / "services/cli/main.py").read_text()))
    for section, settings in SECTIONS.items():
        prefix = f"FESTINA_{section.upper()}_" if section else "FESTINA_"
        found |= {prefix + field.upper() for field in settings.__struct_fields__}
    return found


def interpolated(text: str) -> str:
    """Replace each ``${NAME…}`` by its default, or by its own name."""
    while True:
        found = re.search(r"\$\{(\w+)(?::([-?])([^${}]*))?\}", text)
        if found is None:
            return text
        value = found[3] if found[2] == "-" else found[1]
        text = text[: found.start()] + value + text[found.end() :]


def environment(name: str) -> dict[str, str]:
    return {key: interpolated(value) for key, value in SERVICES[name].get("environment", {}).items()}


@each_service
def test_it_is_hardened_and_pinned(name: str) -> None:
    service = SERVICES[name]
    if name == GUARD:  # the only one with a right, and it talks to nobody outside
        assert service["user"] == "0:0" and service["cap_add"] == ["SYS_ADMIN"]
        assert service["network_mode"] == "none" and "ports" not in service
    else:
        assert service["user"] not in ("", "root", "0") and not service["user"].startswith("0:")
        assert "cap_add" not in service
    assert service["read_only"] and service["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in service["security_opt"] and "privileged" not in service
    assert service["restart"] in ("unless-stopped", "on-failure")
    assert re.fullmatch(r"[\w./-]+:v?\d+\.\d+\.\d+(-[\w.]+)?", service["image"])
    assert service["logging"]["options"]["max-size"]


@each_service
def test_its_ports_are_on_loopback(name: str) -> None:
    for port in SERVICES[name].get("ports", ()):
        assert interpolated(port).startswith("127.0.0.1:"), port


@each_service
def test_it_has_a_health_check(name: str) -> None:
    check = SERVICES[name]["healthcheck"]
    assert check == {"disable": True} if name in JOBS else check["test"] and check["interval"]


def test_what_is_waited_for_is_there() -> None:
    for name, service in SERVICES.items():
        for other, condition in service.get("depends_on", {}).items():
            ended = condition["condition"] == "service_completed_successfully"
            assert (other in JOBS) == ended and (ended or other not in JOBS), (name, other)
    # without this `up --wait` fails when a job has done its work
    assert {n for s in SERVICES.values() for n in s.get("depends_on", {})} >= JOBS


def test_no_credential_is_in_a_file() -> None:
    for name, service in SERVICES.items():
        for key, value in service.get("environment", {}).items():
            if re.search("PASSWORD|TOKEN|SECRET|_KEY|AUTH", key):
                assert re.fullmatch(r"'?\$\{\w+:[-?][^}]*\}'?", value), (name, key)
            assert not re.search(r"://[^/$]*:[^/$]+@", value), (name, key)
    example = (DEPLOY / "env.example").read_text()
    passwords = dict(re.findall(r"^#?(\w+(?:PASSWORD|_KEY))=(.*)$", example, re.M))
    assert len(passwords) == 4 and set(passwords.values()) == {"change-me", ""}


def test_the_example_environment_names_what_the_compose_file_asks_for() -> None:
    asked = set(re.findall(r"\$\{(\w+)", TEXT)) - {"GPU_HOST", "GPU_TYPE"}
    given = set(re.findall(r"^#?([A-Z_]+)=", (DEPLOY / "env.example").read_text(), re.M))
    assert asked == given


@each_service
def test_every_festina_variable_is_a_setting(name: str) -> None:
    assert {key for key in environment(name) if key.startswith("FESTINA_")} <= variables()


def test_the_clock_guard_takes_those_who_ask_it() -> None:
    settings = load(GuardSettings, "clock_guard", environment(GUARD))
    for name in [n for n in OURS if environment(n).get("FESTINA_DEVICE_CLOCKS") == "nvml"]:
        assert environment(name)["FESTINA_DEVICE_CLOCK_GUARD"] == settings.socket
        assert SERVICES[name]["user"].split(":")[0] in settings.uids.split(",")
        folder = settings.socket.rpartition("/")[0]
        assert f"clocks:{folder}" in SERVICES[GUARD]["volumes"]
        assert f"clocks:{folder}:ro" in SERVICES[name]["volumes"]


SERVING = [n for n, s in OURS.items() if "services." in str(s["command"]) and n != GUARD]


@pytest.mark.parametrize("name", SERVING)
def test_every_service_takes_its_settings(name: str) -> None:
    [module] = [part for part in SERVICES[name]["command"] if part.startswith("services.")]
    section = module.split(".")[1]
    assert (ROOT / (module.replace(".", "/") + ".py")).exists()
    common = load(Common, environ=environment(name))
    load(SECTIONS[section], section, environment(name))
    assert common.metrics_port == 9100 and common.nats_password and "@redis:" in common.redis_url
    if section == "local_sched":
        device = load(DeviceSettings, "device", environment(name))
        assert common.id.startswith(device.host) and device_for(device.gpu_type)
        hosts = {environment(n).get("FESTINA_ID") for n, s in OURS.items() if "migrator" in str(s["command"])}
        assert device.host in hosts


def test_data_is_on_named_volumes() -> None:
    named = yaml.safe_load(TEXT)["volumes"]
    for name, path in (("redis", "/data"), ("prometheus", "/prometheus"), ("grafana", "/var/lib/grafana")):
        assert f"{name}:{path}" in SERVICES[name]["volumes"] and name in named


def test_what_is_mounted_or_copied_exists() -> None:
    for service in SERVICES.values():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert not source.startswith(".") or (ROOT / source).exists(), source
    dockerfile = (DEPLOY / "Dockerfile").read_text()
    for sources in re.findall(r"^COPY (?!--from)(.*) \S+$", dockerfile, re.M):
        assert all((ROOT / source).exists() for source in sources.split())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    for package in project["packages"]["find"]["include"]:
        name = package.removesuffix("*")
        assert f"COPY {name} /app/{name}\n" in dockerfile
        assert f"!{name}\n" in (ROOT / ".dockerignore").read_text()
    images = re.findall(r"^FROM (\S+)", dockerfile, re.M)
    assert all(image == "runtime" or re.search(r":\d+\.\d+\.\d+-", image) for image in images)
    for target in dockerfile.split("\nFROM ")[1:]:
        last = "base", "cpu", "gpu"
        assert "USER 10001:10001" in target or not re.match(rf"\S+ AS ({'|'.join(last)})\n", target)


def test_every_dependency_of_the_image_is_pinned() -> None:
    pinned = {
        line.split("==")[0] for line in (DEPLOY / "constraints.txt").read_text().split() if "==" in line
    }
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {re.split(r"[\[><=]", each)[0] for each in project["dependencies"]} <= pinned


# ---- metrics


def emitted() -> set[str]:
    """Every metric that the source shows or counts, by its name in Prometheus."""
    names = set()
    for path in [*(ROOT / "services").rglob("*.py"), *(ROOT / "shared").rglob("*.py")]:
        for call in ast.walk(ast.parse(path.read_text())):
            if not isinstance(call, ast.Call):
                continue
            function = call.func
            called = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
            form = {"Count": "festina_{}_total", "_count": "festina_{}_total", "count": "festina_{}_total"}
            form |= {"show": "festina_{}", "show_each": "festina_{}"}
            if called in form:
                given = [*call.args[:1], *(k.value for k in call.keywords if k.arg == "name")]
                names |= {form[called].format(g.value) for g in given if isinstance(g, ast.Constant)}
    return names


def expressions() -> Iterator[str]:
    for group in yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"]:
        yield from (rule["expr"] for rule in group["rules"])
    for panel in dashboard()["panels"]:
        yield from (target["expr"] for target in panel["targets"])


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DEPLOY / "grafana/dashboards/festina.json").read_text())
    return found


def test_alerts_and_panels_ask_only_for_metrics_that_there_are() -> None:
    asked = {name for text in expressions() for name in re.findall(r"festina_\w+", text)}
    assert len(asked) > 12 and asked <= emitted(), asked - emitted()


def test_the_dashboard_shows_what_is_promised() -> None:
    titles = " ".join(panel["title"].lower() for panel in dashboard()["panels"])
    for shown in ("watts", "clock", "resident", "attainment", "token by model", "token by tenant", "queue"):
        assert shown in titles, shown
    assert "migrations" in titles
    uids = {target["datasource"]["uid"] for panel in dashboard()["panels"] for target in panel["targets"]}
    source = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/prometheus.yaml").read_text())
    assert uids == {source["datasources"][0]["uid"]}


def test_prometheus_finds_the_services_by_the_name_they_share() -> None:
    [job] = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]
    [found] = job["dns_sd_configs"]
    [name] = found["names"]
    for each in SERVING:
        assert SERVICES[each]["networks"]["default"]["aliases"] == [name]
        assert SERVICES[each]["environment"]["FESTINA_METRICS_PORT"] == str(found["port"])
