"""Dense, 0+34x1+0, at SmolLM-360M's shape, for bench.py serve --paper=true: beside mor4_360m, whose unrolled depth it has  [MoR, throughput]."""
block = "llama"             # as smollm/vanilla_360m
n_embd = 960                # as smollm/vanilla_360m
n_head = 15                 # as smollm/vanilla_360m
n_kv_head = 5               # as smollm/vanilla_360m
n_ffn = 2560                # as smollm/vanilla_360m
block_size = 2048           # as smollm/vanilla_360m
n_core = 34                 # 34 blocks, each with its own weights
