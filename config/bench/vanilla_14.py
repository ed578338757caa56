"""Dense, 0+14x1+0, d=256, context 512, for bench.py: beside mor2_14, mor3_14 and mor4_14, whose unrolled depth it has."""
block = "llama"             # Mixture-of-Recursions' block; its rotary tables have to be gathered, and that belongs to the time
n_embd = 256                # small enough for a CPU, large enough that matrices dominate
n_head = 4                  # heads of 64, as in the large models
block_size = 512            # long enough that a step with fewer tokens saves attention too
n_core = 14                 # 14 blocks, each with its own weights
batch_size = 4              # 4 x 512 tokens a step
