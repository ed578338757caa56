"""Dense, 0+32x1+0, d=256, context 512, for bench.py: beside mor2_32 and mor3_32, whose unrolled depth it has; SmolLM-360M's layout."""
block = "llama"             # as vanilla_14
n_embd = 256                # as vanilla_14
n_head = 4                  # as vanilla_14
block_size = 512            # as vanilla_14
n_core = 32                 # 32 blocks, each with its own weights
batch_size = 4              # as vanilla_14
