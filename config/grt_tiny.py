"""GRT on a laptop."""
n_prelude = 1
n_core = 1
n_recur = 4
n_coda = 1
n_embd = 128
n_head = 4
block_size = 256
update = "gate"
gate_bias = 0.0
state_noise = 0.1
gate_noise = 0.1
depth_sampling = "uniform"
batch_size = 8
max_iters = 60
warmup_iters = 10
learning_rate = 2e-3
eval_interval = 40
