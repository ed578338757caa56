"""Dense, 0+12x1+0, d=256, for bench.py: beside grt_12, which executes as many blocks."""
n_embd = 256                # as grt_12
n_head = 4                  # as grt_12
block_size = 256            # as grt_12
n_core = 12                 # 12 blocks, each with its own weights
