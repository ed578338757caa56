#!/bin/sh
# Everything here that wants a GPU, in nine minutes at most: sh config/bench/gpu.sh [FOLDER]
# Each command's table and JSON line go to a file of FOLDER (out/gpu); what one of them cannot do the others still do.
folder=${1:-out/gpu}
mkdir -p "$folder"
try() {
    name=$1 seconds=$2
    shift 2
    echo "python $*" > "$folder/$name.txt"
    timeout "$seconds" python "$@" >> "$folder/$name.txt" 2> "$folder/$name.err" || echo "$name ended with $?: $(tail -n 1 "$folder/$name.err")"
    cut -c 1-200 "$folder/$name.txt" | grep -v '^{'
}
try backends 40 -m pytest -q tests/test_serve.py -k "cuda"
try decode 120 bench.py decode config/gpt2_medium.py config/grt_medium.py config/gpt2_small.py config/grt_small.py --paper=true --repeats=5
try serve 200 bench.py serve --paper=true --requests=400 --length_mean=256 --repeats=1 --rows="['b', 'c', 'd']"
try train 90 bench.py train config/gpt2_small.py config/grt_small.py --repeats=5 --batch_size=16 --gradient_accumulation_steps=1
try train_half 60 bench.py train config/grt_small.py --repeats=5 --batch_size=16 --gradient_accumulation_steps=1 --depth=5
