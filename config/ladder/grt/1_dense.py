"""GRT's components, rung 1: dense, 0+6x1+0, six blocks executed as on every rung."""
n_core = 6                  # six blocks executed, each with its own weights
n_recur = 1                 # no loop
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
