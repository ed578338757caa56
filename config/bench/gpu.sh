#!/bin/sh
# Everything here that wants a GPU, in nine minutes at most: sh config/bench/gpu.sh [FOLDER]     (PYTHON=... for another interpreter)
# A file of FOLDER (out/gpu) for each command: commit, date, command, table and JSON line. What one of them cannot do the others still do.
folder=${1:-out/gpu}
mkdir -p "$folder" && folder=$(cd "$folder" && pwd) && cd "$(dirname "$0")/../.." || exit 2
try() {
    name=$1 seconds=$2
    shift 2
    echo "commit $(git rev-parse --short HEAD 2> "$folder/$name.err" || echo unknown), $(date -u), python $*" > "$folder/$name.txt"
    timeout "$seconds" "${PYTHON:-python}" "$@" >> "$folder/$name.txt" 2> "$folder/$name.err" || echo "$name ended with $?: $(tail -n 1 "$folder/$name.err")"
    grep -v '^{' "$folder/$name.txt"
}
try cuda 40 -m pytest -q tests/test_bench.py -k cuda
try decode_medium 100 bench.py decode config/gpt2_medium.py config/grt_medium.py --paper=true --repeats=5
try decode_small 70 bench.py decode config/gpt2_small.py config/grt_small.py --paper=true --repeats=5
serving="--paper=true --requests=160 --warmup=128 --repeats=1 --unwritten=false --rows=b --rows=c --rows=d"
try serve_32 130 bench.py serve config/smollm/vanilla_360m.py config/bench/mor2_360m.py config/mor_360m.py $serving
try serve_34 80 bench.py serve config/bench/vanilla_34_360m.py config/bench/mor4_360m.py $serving
try train 70 bench.py train config/gpt2_small.py config/grt_small.py --repeats=5 --batch_size=16 --gradient_accumulation_steps=1
try train_half 50 bench.py train config/grt_small.py --repeats=5 --batch_size=16 --gradient_accumulation_steps=1 --depth=5
