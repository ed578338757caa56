"""Dense, 0+8x1+0, d=256, for bench.py: beside grt_8, which executes as many blocks."""
n_embd = 256                # as grt_8
n_head = 4                  # as grt_8
block_size = 256            # as grt_8
n_core = 8                  # 8 blocks, each with its own weights
