"""The setup script of the compiled form: the hot pure modules as machine code, by mypyc.

`make compiled` copies the packages to build/compiled, this file beside them as setup.py, and compiles there,
so that no compiled module ever stands beside the sources that are edited. What is not named here is
interpreted, as everything is in a checkout: modules of msgspec structs, which gain nothing, and those that do
I/O. Both forms do the same, to the last bit of every number (tests/sim/test_compiled.py).
"""

from mypyc.build import mypycify
from setuptools import setup

HOT = {
    "services/local_sched": """admission attribution batch clocks core divide emulated
        emulated_engine emulated_kv emulated_meter emulated_step ends energy engines evict
        grants grid ledger live loads made_up move_mode moves outbox pacing plans points rest
        running spans state summary tables transfer tune watch work""",
    "services/global_sched": """alike asks core curves dispatch estimate fleet placing pools predict
        predict_standin reasons scale_out search view""",
    "services/consolidator": "cluster consolidate core course election orders place relief upkeep window",
    "services/gateway": "core drains inflight liveness registry",
    "sim": "chance clients hardware lengths network nodes scenario shells wakes world",
    "shared": "known_models lut lut_grid lut_query overload shelf silicon slabs slo weights",
}
FILES = [f"{folder}/{name}.py" for folder, names in HOT.items() for name in names.split()]
OPTIONS = ["--config-file=", "--ignore-missing-imports"]

# All modules lie in one library, whose functions nobody replaces: they call each other directly.
DIRECT = ["-fvisibility=hidden", "-fno-semantic-interposition"]

extensions = mypycify(
    [*OPTIONS, *FILES], opt_level="1", debug_level="0", multi_file=True, group_name="festina"
)
for extension in extensions:
    extension.extra_compile_args += DIRECT

setup(ext_modules=extensions)
