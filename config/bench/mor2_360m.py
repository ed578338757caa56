"""Mixture-of-Recursions, expert-choice, 1+15x2+1, at SmolLM-360M's shape, for bench.py serve --paper=true: mor_360m with N = 2  [MoR, throughput]."""
block = "llama"             # as smollm/vanilla_360m
n_embd = 960                # as smollm/vanilla_360m
n_head = 15                 # as smollm/vanilla_360m
n_kv_head = 5               # as smollm/vanilla_360m
n_ffn = 2560                # as smollm/vanilla_360m
block_size = 2048           # as smollm/vanilla_360m
n_prelude = 1               # as mor_360m
n_core = 15                 # 1+15x2+1 unrolls to 32 blocks and owns 17
n_recur = 2                 # see n_core
n_coda = 1                  # as mor_360m
router = "expert"           # what is measured: the first step takes all tokens, the last 1/2
