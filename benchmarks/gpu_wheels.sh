#!/bin/sh
# Wheels of what headprune needs and a lent GPU machine (Python 3.12, torch 2.11, no network) has not, into .whl/ of this checkout, and
# minilm-rt into .gpu/; git ignores both. Run where there is a network; then carry .whl and .gpu, and type there, until all parts are done:
#   cp .gpu/*.json $OUT/ 2>/dev/null
#   python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site .whl/*.whl && export PYTHONPATH=/tmp/site:$PWD
#   python3 benchmarks/gpu_correct.py --work $OUT/gpu_correct.json --minilm .gpu/minilm-rt --seconds 560
# After every call, copy gpu_correct.json from where its files come back into .gpu/: the next call begins with it. Then the same with
# gpu_latency.py --work $OUT/gpu_latency.json.
set -eu
cd "$(dirname "$0")/.."
python3 -m pip download --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
  --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
  --platform manylinux1_x86_64 -d .whl \
  pydantic==2.14.3 pydantic-core==2.50.4 annotated-types==0.8.0 typing-inspection==0.4.5 datasets==5.2.0 dill==0.4.1 multiprocess==0.70.19
# minilm-rt, where it lies beside the checkout
if [ -d ../shared/real/minilm-rt ]; then mkdir -p .gpu && cp -rL ../shared/real/minilm-rt .gpu/ && chmod -R u+w .gpu; fi
du -sh .whl .gpu 2>/dev/null
