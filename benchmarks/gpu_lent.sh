#!/bin/sh
# The GPU benchmarks on a lent machine without a network: what is missing in .gpu/gpu_correct.json and .gpu/gpu_latency.json, in the seconds
# that are left. `sh benchmarks/gpu_wheels.sh` gets ready what to carry (.whl and .gpu). On the machine, with $OUT as the folder that comes back:
#   sh benchmarks/gpu_lent.sh 540
# Then copy gpu_*.json from there into .gpu/; the next call goes on from them. Correctness is tried side by side; times one after another.
# docs/scale.md holds what earlier calls measured. Never sample stacks by `faulthandler` there: it crashes; a thread that reads `sys._current_frames()` does not.
set -u
left() { echo $((end - $(date +%s))); }
end=$(($(date +%s) + ${1:-540}))
python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site .whl/*.whl || exit 1
export PYTHONPATH=/tmp/site:$PWD PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
cp .gpu/gpu_*.json "$OUT/" 2>/dev/null
mkdir -p /tmp/parts/correct /tmp/parts/latency
missing() { # of gpu_$1.py, those of the parts named behind that are not done
  python3 - "$OUT/gpu_$1.json" "$@" <<'P'
import json, os, sys
path, _, *parts = sys.argv[1:]
known = json.load(open(path)) if os.path.exists(path) else {}
print(*(part for part in parts if "lines" not in known.get(part, {})))
P
}
beside() { # a part of gpu_$1.py, with others
  OMP_NUM_THREADS=2 timeout "$(left)" timeout 200 python3 "benchmarks/gpu_$1.py" --work "/tmp/parts/$1/$2.json" --only "$2" --seconds 9999 > "/tmp/parts/$2.log" 2>&1 &
}
for part in $(missing correct alike-float32 alike-TF32 alike-bfloat16 alike-float16 tests coverage kernels); do beside correct "$part"; done
wait
python3 - "$OUT" <<'P'
import glob, json, os, sys
for which in ("correct", "latency"):
    path = f"{sys.argv[1]}/gpu_{which}.json"
    found = json.load(open(path)) if os.path.exists(path) else {}
    for part in glob.glob(f"/tmp/parts/{which}/*.json"):
        found |= json.load(open(part))
    json.dump(found, open(path, "w"))
P
cat /tmp/parts/*.log > "$OUT/beside.log"
echo "side by side: $(left) s left"
run() { # a part alone, for as long as it may take
  [ "$(left)" -gt 20 ] || return
  timeout "$(left)" timeout "$3" python3 "benchmarks/gpu_$1.py" --work "$OUT/gpu_$1.json" --only "$2" --seconds 9999 --minilm .gpu/minilm-rt >> "$OUT/$1.log" 2>&1
  echo "$2: $?, $(left) s left"
}
for part in $(missing latency command-llama-1b eight command-bert-base command-minilm latency-8b latency-bert writing graphs multiples latency-1b latency-vit); do run latency "$part" 400; done
for part in $(missing correct speed); do run correct "$part" 250; done
