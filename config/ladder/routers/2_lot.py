"""Routers, the second rung: as many tokens as by capacity, drawn by lot, 1+1x3+1."""
n_prelude = 1               # as mor_tiny: 1 + 1 x 3 + 1, five blocks executed at most
n_core = 1                  # as mor_tiny
n_recur = 3                 # as mor_tiny
n_coda = 1                  # as mor_tiny
router = "expert"           # a step takes its top k of those who took the last; outside training, by threshold
router_choice = "random"    # the floor that a router has to beat
block = "llama"             # as grt_tiny, like all that follows
n_embd = 128
n_head = 4
block_size = 256
batch_size = 8              # 2,048 tokens per step
max_iters = 1200            # 2.5M tokens: four to six minutes of one core
learning_rate = 2e-3
warmup_iters = 100
eval_interval = 400         # a checkpoint to go on from at every third of the run
eval_tokens = 65536         # 256 windows, the same for all
log_interval = 50
