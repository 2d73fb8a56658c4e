#!/bin/sh
# Wheels of what headprune needs and a lent GPU machine (Python 3.12, torch 2.11, no network) has not, into .whl/ of this checkout, and
# minilm-rt into .gpu/; git ignores both. Run where there is a network; then `gpu_lent.sh` there.
set -eu
cd "$(dirname "$0")/.."
python3 -m pip download --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
  --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
  --platform manylinux1_x86_64 -d .whl \
  pydantic==2.14.3 pydantic-core==2.50.4 annotated-types==0.8.0 typing-inspection==0.4.5 datasets==5.2.0 dill==0.4.1 multiprocess==0.70.19
# minilm-rt, where it lies beside the checkout
if [ -d ../shared/real/minilm-rt ]; then mkdir -p .gpu && cp -rL ../shared/real/minilm-rt .gpu/ && chmod -R u+w .gpu; fi
du -sh .whl .gpu 2>/dev/null
