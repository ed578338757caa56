"""Dense, with as many parameters as grt_tiny: 0+3x1+0, half of gpt_tiny's blocks."""
n_core = 3                  # three blocks, as grt_tiny owns
n_recur = 1                 # no loop
n_ffn = 416                 # in place of 344: wider MLPs hold what adapter and gate hold in grt_tiny (within 0.1%)
block = "llama"             # as grt_tiny
n_embd = 128
n_head = 4
block_size = 256
batch_size = 8
max_iters = 1500
learning_rate = 2e-3
warmup_iters = 100
eval_interval = 500
eval_tokens = 32768
log_interval = 50           # a line every ten to twenty seconds
