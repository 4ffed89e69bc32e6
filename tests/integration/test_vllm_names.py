"""Names of vLLM that it does not call public and that our extension relies on, looked up in what is here.

To be run first with another version of vLLM: it says which names are gone, before anything is started.
"""

import ast
import os
import subprocess
from pathlib import Path

import pytest
from vllm_support import PYTHON, ROOT, needs_vllm, told_by_vllm

from services.local_sched.vllm_child import child_environment
from services.local_sched.vllm_ext.version import TESTED_VERSIONS

pytestmark = needs_vllm

EXTENSION = ROOT / "services" / "local_sched" / "vllm_ext"

CLASSES = {  # module: class: what we use of it beyond its constructor
    "vllm.v1.core.sched.scheduler": {
        "Scheduler": (
            "schedule _handle_blocked_waiting_request has_finished_requests requests running waiting"
            " max_num_scheduled_tokens max_num_active_reqs scheduler_config kv_cache_manager kv_cache_config"
            " block_size"
        )
    },
    "vllm.v1.core.sched.output": {"SchedulerOutput": "num_scheduled_tokens"},
    "vllm.v1.core.kv_cache_manager": {"KVCacheManager": "allocate_slots get_block_ids block_pool"},
    "vllm.v1.core.block_pool": {"BlockPool": "get_num_free_blocks"},
    "vllm.v1.kv_cache_interface": {"KVCacheConfig": "num_blocks kv_cache_tensors kv_cache_groups"},
    "vllm.v1.request": {
        "Request": (
            "request_id num_tokens num_computed_tokens num_prompt_tokens num_preemptions cache_salt"
            " next_decode_eligible_step"
        )
    },
    "vllm.v1.engine.llm_engine": {
        "LLMEngine": (
            "engine_core vllm_config add_request abort_request step has_unfinished_requests sleep wake_up"
            " collective_rpc apply_model reset_prefix_cache from_engine_args"
        )
    },
    "vllm.v1.engine.core_client": {"InprocClient": "engine_core"},
    "vllm.v1.engine.core": {"EngineCore": "scheduler"},
    "vllm.config": {"CompilationConfig": "static_forward_context"},
    "vllm.v1.worker.gpu_worker": {"Worker": "reload_weights"},
    "vllm.platforms": {"current_platform": "is_cpu"},
    "vllm.utils.torch_utils": {
        "_patched_set_stream": ""
    },  # in the place of torch's, and followed by all work
    "vllm.envs": {"VLLM_DISABLE_SHARED_EXPERTS_STREAM": ""},
    "vllm.outputs": {"RequestOutput": "outputs request_id"},
    "vllm.sampling_params": {"RequestOutputKind": "DELTA"},
    "vllm": {"EngineArgs": "", "LLMEngine": "", "SamplingParams": "", "TokensPrompt": ""},
}

PLANTED = {"vllm.nowhere": {"Nothing": ""}, "vllm.v1.outputs": {"ModelRunnerOutput": "no_such_name"}}
"""Names that are not there: that they are missed shows that the others are looked for."""

LOOK_UP = """
import importlib, inspect, json, re, sys
missing = []
[listed] = json.loads(sys.argv[1])
for module, classes in listed.items():
    for name, used in classes.items():
        try:
            found = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            missing.append(f"{module}.{name}")
            continue
        source = ""
        for each in inspect.getmro(found) if inspect.isclass(found) else ():
            if each.__module__.startswith("vllm"):
                source += inspect.getsource(each)
        for attribute in used.split():
            made = re.search(rf"self\\.{attribute}\\b|^    {attribute}\\s*[:=]", source, re.MULTILINE)
            if not hasattr(found, attribute) and not made:
                missing.append(f"{module}.{name}.{attribute}")

from vllm.inputs import TokensPrompt
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request
from services.local_sched.vllm_ext.served import cache_salt

init_none_hash(sha256)
def first_hash(tenant, key=b"k" * 32):
    params = SamplingParams(max_tokens=1)
    params.update_from_generation_config({}, eos_token_id=2)
    request = Request(request_id="r", prompt_token_ids=list(range(64)), sampling_params=params,
                      pooling_params=None, cache_salt=cache_salt(key, tenant),
                      block_hasher=get_request_block_hasher(32, sha256))
    return request.block_hashes[0].hex()
hashes = [first_hash("a"), first_hash("a"), first_hash("b"), first_hash("a", b"x" * 32)]
print("TOLD " + json.dumps([missing, hashes, cache_salt(b"k" * 32, "a")]))
"""


@pytest.fixture(scope="module")
def found() -> tuple[list[str], list[str], str]:
    """Missing names, the hashes of one prompt under the salts of tenants, and such a salt."""
    return tuple(told_by_vllm(LOOK_UP, CLASSES | PLANTED))


def test_every_name_is_there(found: tuple[list[str], list[str], str]) -> None:
    planted = ["vllm.nowhere.Nothing", "vllm.v1.outputs.ModelRunnerOutput.no_such_name"]
    assert found[0] == planted, f"vLLM has these no more: {set(found[0]) - set(planted)}"


def test_a_prefix_of_one_tenant_is_not_found_by_another(found: tuple[list[str], list[str], str]) -> None:
    _, (mine, again, others, elsewhere), salt = found
    assert mine == again
    assert len({mine, others, elsewhere}) == 3
    assert len(salt) == 32 and set(salt) <= set("0123456789abcdef")


def test_the_list_has_every_module_that_the_extension_imports() -> None:
    used = set()
    for path in EXTENSION.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                used |= {(node.module, alias.name) for alias in node.names}
    listed = {(module, name) for module, names in CLASSES.items() for name in names}
    assert used and used <= listed, used - listed


def test_the_tested_version_is_the_one_that_is_set_up(tmp_path: Path) -> None:
    from services.local_sched.vllm_env import VLLM

    assert VLLM.partition("==")[2] in TESTED_VERSIONS
    refused = subprocess.run(
        [
            str(PYTHON),
            "-c",
            "from services.local_sched.vllm_ext import version\n"
            "version.TESTED_VERSIONS = ('0.1.0',)\nversion.check_vllm_version()",
        ],
        env=child_environment(os.environ, str(tmp_path)),
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert f"vLLM {TESTED_VERSIONS[0]} here, but this engine was tested with 0.1.0 only" in refused.stderr
