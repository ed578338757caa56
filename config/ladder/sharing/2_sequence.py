"""Four ways of sharing, the second: sequence, 0+3x2+0."""
n_core = 3                  # three blocks owned, six executed
n_recur = 2                 # see n_core
sharing = "sequence"        # 1 1 2 2 3 3
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
