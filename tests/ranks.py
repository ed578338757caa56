"""What the processes of test_parallel.py do: each name given is one run of train.py, looked at from inside.

    torchrun --nproc_per_node=2 tests/ranks.py FOLDER NAME ...        (test_parallel.py does this)

All in float64, so that sums in another order stay equal to many places. Rank r leaves NAME.r.pt in FOLDER.
"""
import functools
import os
import shutil
import signal
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

import config  # noqa: E402, F401  before torch
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from toy import flags  # noqa: E402

import train  # noqa: E402

CALM = dict(depth_sampling="fixed", state_noise=0.0, gate_noise=0.0, gradient_accumulation_steps=4, max_iters=10)
WILD = dict(gradient_accumulation_steps=4, max_iters=20, eval_interval=4, dropout=0.1)
SHORT = dict(WILD, max_iters=5, lr_decay_iters=20)
STEADY = dict(CALM, max_iters=4, eval_interval=2, eval_tokens=160, update="replace")                # 5 windows: they do not go in two
AUX = dict(STEADY, router="expert", aux_router=True, aux_router_lr_scale=3.0, capacity_warmup_iters=3)
BIASED = dict(STEADY, router="token", router_balance="bias", router_bias_rate=0.02)
RIVALS = {"poisson": dict(SHORT, depth_sampling="poisson", state_init="random", bptt=2), "ouro": dict(SHORT, loss="every", loop_norm=True),
          "lora": dict(SHORT, lora_rank=2)}
RUNS = {
    "ddp": dict(CALM), "fsdp": dict(CALM, parallel="fsdp"),
    "ddp half": dict(CALM, max_iters=5, lr_decay_iters=10), "fsdp half": dict(CALM, max_iters=5, lr_decay_iters=10, parallel="fsdp"),
    "wild ddp": dict(WILD), "wild fsdp": dict(WILD, parallel="fsdp"), "broken": dict(WILD), "stopped": dict(WILD),
    "lean ddp": dict(SHORT, checkpoint_activations=True), "lean fsdp": dict(SHORT, checkpoint_activations=True, parallel="fsdp"),
    "compiled": dict(SHORT, compile=True), "compiled fsdp": dict(SHORT, compile=True, parallel="fsdp"),
    "gathers": dict(CALM, max_iters=2, log_interval=100, gradient_accumulation_steps=2, parallel="fsdp"),
    "on 4": dict(CALM, init_from="resume", parallel="fsdp"), "odd": dict(CALM, gradient_accumulation_steps=5),
    "routed ddp": dict(SHORT, router="expert"), "routed fsdp": dict(SHORT, router="expert", kv="share", update="replace", parallel="fsdp"),
    "aux ddp": dict(AUX), "aux fsdp": dict(AUX, parallel="fsdp", checkpoint_activations=True),
    "biased ddp": dict(BIASED, checkpoint_activations=True), "biased fsdp": dict(BIASED, parallel="fsdp"),
    **{f"{name} {parallel}": dict(keys, parallel=parallel, checkpoint_activations=parallel == "fsdp") for name, keys in RIVALS.items() for parallel in ("ddp", "fsdp")},
    "uneven": dict(CALM, max_iters=2), "default set": dict(CALM, max_iters=1, dataset="stdlib"),
}


def with_gaps(batches):
    """The same batches, with other numbers of targets that count in each."""
    return [(ids_BT, targets_BT.masked_fill(ids_BT % (2 + ids_BT[0, 0] % 5) > 0, -100)) for ids_BT, targets_BT in batches]


class Watched:
    """train.py's functions with an ear at each: depths, data, gradients, gathers of the core, and the weights at the end."""

    def __init__(self, name):
        self.name, self.seen = name, {"depths": [], "first_ids": [], "gradients": None, "events": [], "weights": None}
        self.step_gradients, self.clip, self.train, self.step = train.step_gradients, train.clip_gradients, train.Run.train, 0

    def __enter__(self):
        from torch.distributed.fsdp._fully_shard import _fsdp_param_group as group
        self.group, self.gather, self.backward = group, group.foreach_all_gather, torch.Tensor.backward
        train.step_gradients, train.clip_gradients, train.Run.train = self.on_step, self.on_clip, lambda run: self.on_train(run)
        group.foreach_all_gather = self.on_gather
        self.prepare, train.prepare.prepare = train.prepare.prepare, self.on_prepare
        torch.Tensor.backward = lambda tensor, *args, **kwargs: self.on_backward(tensor, *args, **kwargs)
        return self.seen

    def __exit__(self, *_):
        train.step_gradients, train.clip_gradients, train.Run.train = self.step_gradients, self.clip, self.train
        self.group.foreach_all_gather, torch.Tensor.backward = self.gather, self.backward
        train.prepare.prepare = self.prepare

    def on_prepare(self, source, data_dir):
        """The default set takes its time."""
        self.seen["events"].append(f"prepare {source}")
        time.sleep(1)
        shutil.copytree(Path(data_dir, "toy"), Path(data_dir, source))

    def on_step(self, net, batches, *args):
        self.step += 1
        rank, again = int(os.environ["RANK"]), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
        if self.name == "broken" and self.step == 10 and rank == 1 and not again:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.name == "stopped" and self.step == 3 and rank == 0:
            os.kill(os.getpid(), signal.SIGINT)
        self.seen["events"].append("step")
        self.seen["first_ids"].append([ids_BT[0].tolist() for ids_BT, _ in batches])
        loss, load = self.step_gradients(net, with_gaps(batches) if self.name == "uneven" else batches, *args)
        self.seen["depths"].append(train.mean_depth(load.tolist()))
        return loss, load

    def on_clip(self, model, grad_clip):
        if self.seen["gradients"] is None:
            self.seen["gradients"] = {name: train.gathered(p.grad).clone() for name, p in model.named_parameters()}
        return self.clip(model, grad_clip)

    def on_train(self, run):
        try:
            self.train(run)
        finally:
            self.seen["weights"] = train.gathered(run.model.state_dict())

    def on_gather(self, params, *args, **kwargs):
        if any("recursion" in p._param_fqn for p in params):
            self.seen["events"].append("core")
        return self.gather(params, *args, **kwargs)

    def on_backward(self, *args, **kwargs):
        self.seen["events"].append("backward")
        return self.backward(*args, **kwargs)


def main(folder, *names):
    os.chdir(folder)
    torch.set_default_dtype(torch.float64)
    train.want_compile, train.compile_parts = lambda choice, device: choice is True, functools.partial(train.compile_parts, backend="eager")
    with train.World().together(torch.device("cpu")):
        for name in names:
            with Watched(name) as seen:
                try:
                    train.main(["toy.py", *flags(**RUNS[name], out_dir=f"out/{name}")])
                    seen["end"] = "done"
                except (KeyboardInterrupt, SystemExit, train.UserError) as end:
                    seen["end"] = f"{type(end).__name__} {end}"
            torch.save(seen, f"{name}.{dist.get_rank()}.pt")
            dist.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
    # Everything is written. Once in many launches torch's own threads abort while the interpreter ends ("terminate called
    # without an active exception"), and that is not what is tested here.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
