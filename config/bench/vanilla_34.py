"""Dense, 0+34x1+0, d=256, context 512, for bench.py: beside mor4_34, whose unrolled depth it has."""
block = "llama"             # as vanilla_14
n_embd = 256                # as vanilla_14
n_head = 4                  # as vanilla_14
block_size = 512            # as vanilla_14
n_core = 34                 # 34 blocks, each with its own weights
batch_size = 4              # as vanilla_14
