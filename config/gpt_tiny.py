"""Dense, with as many block executions as grt_tiny: 0+6x1+0. Same data, tokens, optimizer and schedule."""
n_core = 6                  # six blocks, each with its own weights: twice grt_tiny's parameters
n_recur = 1                 # no loop
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
