"""Four ways of sharing, the third: cycle between a first and a last block of their own, 1+2x2+1."""
n_prelude = 1               # 1 + 2 x 2 + 1: four blocks owned, six executed
n_core = 2                  # see n_prelude
n_recur = 2                 # see n_prelude
n_coda = 1                  # see n_prelude
sharing = "middle_cycle"    # 1 2 3 2 3 4
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
