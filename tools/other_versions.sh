#!/bin/sh
# The fast tests with other versions of torch and transformers than the pinned ones (docs/scale.md, GPUs):
#   sh tools/other_versions.sh 2.11.0 5.17.0 [pytest's options]
# Into an environment of its own, 5 GB: PyPI's torch is built for CUDA, and runs on a CPU too.
set -eu
cd "$(dirname "$0")/.."
torch=$1 transformers=$2
shift 2
there=.other/$torch-$transformers
if [ ! -d "$there" ]; then
  python3 -m venv "$there"
  PIP_FIND_LINKS='' "$there/bin/python" -m pip install --quiet --disable-pip-version-check "torch==$torch" "transformers==$transformers" . pytest pytest-xdist hypothesis
  "$there/bin/python" -m pip uninstall --quiet --yes headprune # this checkout is tested
fi
PYTHONPATH=$PWD HF_HUB_OFFLINE=1 "$there/bin/python" -m pytest -q -n 2 --dist worksteal -m "not slow" -p no:cacheprovider "$@"
