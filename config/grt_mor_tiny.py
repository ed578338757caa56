"""A router on a gated core, minutes on a laptop CPU, 1+1x3+1: token-wise halting for GRT, which its paper lists as missing."""
n_prelude = 1               # one block makes the anchor
n_core = 1                  # one block is the whole loop
n_recur = 3                 # capacities 3/3, 2/3, 1/3 of all tokens: 2 steps on average
n_coda = 1                  # one block reads the state out
block = "llama"             # as grt_tiny
n_embd = 128                # as grt_tiny
n_head = 4                  # heads of 32
block_size = 256            # bytes: about eight lines of Python
update = "gate"             # chosen tokens: h + s (1 - g) (core(W [h ; e]) - h), s = sigmoid(router); the others keep h
gate_bias = 0.0             # as grt_tiny
state_noise = 0.02          # as grt_tiny
gate_noise = 0.1            # as grt_tiny
router = "expert"           # alpha is 1 beside a gate: 0.1 would leave a tenth of the proposal
router_kind = "mlp"         # as mor_tiny
router_loss = 0.04          # as mor_tiny
batch_size = 8              # 2,048 tokens per step, as grt_tiny
max_iters = 1500            # 3.1M of the data set's 11M tokens
learning_rate = 2e-3        # as grt_tiny
warmup_iters = 100          # as grt_tiny
eval_interval = 500         # three looks, three checkpoints
eval_tokens = 32768         # 128 windows
log_interval = 50           # a line every ten seconds
