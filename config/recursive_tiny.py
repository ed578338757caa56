"""A plain recursive transformer in grt_tiny's layout, 1+1x4+1: the same block four times, nothing else."""
n_prelude = 1
n_core = 1
n_recur = 4
n_coda = 1
update = "replace"          # h = core(h): no anchor, no gate, no noise
depth_sampling = "fixed"    # always four steps, as recursive transformers are trained
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
