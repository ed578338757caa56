"""Dense, 0+8x1+0, d=256, for bench.py: beside the GRT that executes as many blocks."""
n_embd = 256
n_head = 4
block_size = 256
n_core = 8
