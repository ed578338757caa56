"""GRT's components, rung 7: the gate with the paper's bias, 1+1x4+1."""
n_prelude = 1               # 1 + 1 x 4 + 1: six blocks executed, three owned
n_core = 1                  # one block is the whole loop
n_recur = 4                 # see n_prelude
n_coda = 1                  # see n_prelude
update = "gate"             # h = g h + (1 - g) core(W [h ; e])
proj_init = "scaled"        # the adapter passes on what it reads: at this width the papers' N(0, 0.02) leaves a third of it (NOTES)
gate_bias = 4.0             # the paper's: .982 of the old state is kept at every step
state_noise = 0.02          # as large as the embeddings are at the start (grt_tiny)
gate_noise = 0.1            # as in the paper
depth_sampling = "uniform"  # as in all recurrent rungs: 1 to n_recur, one draw per micro-batch
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
