"""GRT in minutes on a laptop CPU: 1+1x4+1 executes 6 blocks and owns 3. `python train.py` alone means this file."""
n_prelude = 1               # one block makes the anchor
n_core = 1                  # one block is the whole loop, as in GRT Small
n_recur = 4                 # deeper costs more than it gives in so short a run
n_coda = 1                  # one block reads the state out
block = "llama"             # rotary positions know at once what near means; learned ones took half a bit per byte longer
n_embd = 128                # width against steps: at 192 the same CPU time buys half the steps and a worse loss
n_head = 4                  # heads of 32
block_size = 256            # bytes: about eight lines of Python
update = "gate"             # h = g h + (1 - g) core(W [h ; e])
gate_bias = 0.0             # half open: at the paper's +4 the loss is .03 lower, but by leaving the loop out (README)
state_noise = 0.02          # as large as the embeddings are at the start; the paper's 0.1 drowns them in a short run
gate_noise = 0.1            # as in the paper
depth_sampling = "uniform"  # 1 to 4 steps, one draw per micro-batch: the model works at every depth
batch_size = 8              # 2,048 tokens per step: many small steps learn faster here than few large ones
max_iters = 1500            # 3.1M of the data set's 11M tokens
learning_rate = 2e-3        # 1e-3, 3e-3 and 4e-3 were worse
warmup_iters = 100          # the second moments of AdamW need about as long
eval_interval = 500         # three looks, three checkpoints
eval_tokens = 32768         # 128 windows: the evaluation takes a twentieth of the time
log_interval = 50           # a line every ten to twenty seconds
