"""The import rules of docs/architecture.md, section 3, held by reading the source."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SERVICES = ("gateway", "global_sched", "local_sched", "consolidator", "migrator")

# Files that do I/O; every other file below shared/ and services/ is pure.
SHELL_FILES = {
    "shared/bus.py",
    "shared/catalog.py",
    "shared/clock.py",
    "shared/config.py",
    "shared/metrics.py",
    "shared/process.py",
    "shared/recording.py",
    "shared/runtime.py",
    "shared/span_log.py",
    "shared/stage.py",
    "shared/standin/__init__.py",
    "shared/store.py",
    "shared/tracing.py",
    "services/cli/__main__.py",
    "services/cli/doctor.py",
    "services/cli/explain.py",
    *(f"services/cli/gpu_check/{path.name}" for path in (ROOT / "services/cli/gpu_check").glob("*.py")),
    "services/cli/lut.py",
    "services/cli/lut_plot.py",
    "services/cli/lut_print.py",
    "services/cli/main.py",
    "services/cli/pool.py",
    "services/cli/profile.py",
    "services/cli/profile_target.py",
    "services/cli/supervise.py",
    "services/cli/tables.py",
    "services/cli/up.py",
    *(f"services/{name}/main.py" for name in SERVICES),
    "services/gateway/admin.py",
    "services/gateway/api.py",
    "services/gateway/auth.py",
    "services/gateway/completions.py",
    "services/gateway/quota.py",
    "services/gateway/service.py",
    "services/gateway/streams.py",
    "services/gateway/tokenizers.py",
    "services/gateway/web.py",
    "services/local_sched/clock_guard.py",
    "services/local_sched/engine_emulated.py",
    "services/local_sched/engine_vllm.py",
    "services/local_sched/gpu_kernels.py",
    "services/local_sched/clock_setters.py",
    "services/local_sched/gpu_nvml.py",
    "services/local_sched/host_probe.py",
    "services/local_sched/nvml.py",
    "services/local_sched/profile.py",
    "services/local_sched/profile_aic.py",
    "services/local_sched/profile_journal.py",
    "services/local_sched/profile_kernels.py",
    "services/local_sched/profile_lab.py",
    "services/local_sched/vllm_child.py",
    "services/local_sched/vllm_env.py",
    "services/migrator/carrier.py",
    "services/migrator/link.py",
    "services/migrator/receiver.py",
    "services/migrator/stages.py",
    "services/migrator/tasks.py",
    "services/migrator/transport_tcp.py",
    "services/migrator/weight_files.py",
    "sim/cells.py",
    "sim/cli.py",
    "sim/collector.py",
    "sim/compare.py",
    "sim/compare_cli.py",
    "sim/compare_write.py",
    "sim/figures.py",
    "sim/consolidate_check.py",
    "sim/grid.py",
    "sim/live_check.py",
    "sim/live_plot.py",
    "sim/live_pool.py",
    "sim/page.py",
    "sim/paper/ablation.py",
    "sim/paper/build.py",
    "sim/paper/courses.py",
    "sim/paper/entry.py",
    "sim/paper/facts.py",
    "sim/paper/head_to_head.py",
    "sim/paper/pooling.py",
    "sim/paper_cli.py",
    "sim/replay.py",
    "sim/soak.py",
    "sim/tables.py",
    "sim/traces.py",
    "sim/workers.py",
}
# runs inside the engine's own process, beside vLLM
SHELL_FOLDER = "services/local_sched/vllm_ext/"
PURE_STDLIB = {
    "bisect",
    "collections",
    "copy",
    "dataclasses",
    "enum",
    "functools",
    "hashlib",
    "heapq",
    "itertools",
    "math",
    "re",
    "struct",
    "typing",
    "zlib",
}
PURE_LIBRARIES = {"msgspec", "numpy", "scipy"}
# pure code that needs a tokenizer's own decoder; it is handed one, and names only its type
EXTRA = {"services/gateway/text.py": {"tokenizers"}}


def sources() -> list[Path]:
    return sorted(p for top in ("shared", "services", "sim") for p in (ROOT / top).rglob("*.py"))


def pure_sources() -> list[Path]:
    return [p for p in sources() if name_of(p) not in SHELL_FILES and not name_of(p).startswith(SHELL_FOLDER)]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imports_of(path: Path) -> Iterator[str]:
    """Full names of the modules a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def module_file(module: str) -> str | None:
    """The file of ours that an imported name lives in, None for others' modules."""
    parts = module.split(".")
    for n in range(len(parts), 0, -1):
        base = "/".join(parts[:n])
        for candidate in (f"{base}.py", f"{base}/__init__.py"):
            if (ROOT / candidate).is_file():
                return candidate
    return None


@pytest.mark.parametrize("path", pure_sources(), ids=name_of)
def test_pure_files_import_only_what_cannot_do_io(path: Path) -> None:
    allowed = PURE_STDLIB | PURE_LIBRARIES | EXTRA.get(name_of(path), set())
    for module in imports_of(path):
        top = module.split(".")[0]
        if top in ("shared", "services", "sim"):
            target = module_file(module)
            assert target not in SHELL_FILES, f"{name_of(path)} is pure and imports {target}"
        else:
            assert top in allowed, f"{name_of(path)} is pure and imports {module}"
            assert not module.startswith("numpy.random")


@pytest.mark.parametrize("path", pure_sources(), ids=name_of)
def test_pure_files_do_not_open_print_or_ask(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in {"open", "print", "input", "exec", "eval"}, (
                f"{name_of(path)}:{node.lineno}"
            )


@pytest.mark.parametrize("service", SERVICES)
def test_no_service_imports_another(service: str) -> None:
    others = {f"services.{name}" for name in SERVICES if name != service}
    for path in (ROOT / "services" / service).rglob("*.py"):
        for module in imports_of(path):
            assert not any(module == o or module.startswith(o + ".") for o in others), (
                f"{name_of(path)}: {module}"
            )


def test_engine_and_web_libraries_stay_where_they_belong() -> None:
    for path in sources():
        where = name_of(path)
        for module in imports_of(path):
            top = module.split(".")[0]
            if top in {"vllm", "torch", "pynvml"}:
                assert where.startswith("services/local_sched/"), f"{where} imports {module}"
            if top in {"fastapi", "starlette", "uvicorn"}:
                assert where.startswith("services/gateway/"), f"{where} imports {module}"
            if where.startswith(SHELL_FOLDER):
                ours = module_file(module)
                inside = ours is None or ours.startswith(("shared/", SHELL_FOLDER))
                assert inside or ours in {"services/__init__.py", "services/local_sched/__init__.py"}, where


def test_only_the_command_line_imports_the_simulator() -> None:
    for path in sources():
        if not name_of(path).startswith("sim/") and name_of(path) != "services/cli/main.py":
            assert not any(m == "sim" or m.startswith("sim.") for m in imports_of(path)), name_of(path)


def test_shared_imports_no_service() -> None:
    for path in (ROOT / "shared").rglob("*.py"):
        for module in imports_of(path):
            assert not module.startswith("services"), f"{name_of(path)}: {module}"


def test_the_list_of_shell_files_names_only_files_that_exist() -> None:
    assert sorted(f for f in SHELL_FILES if not (ROOT / f).is_file()) == []
