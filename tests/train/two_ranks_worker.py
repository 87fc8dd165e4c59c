"""The program that `torchrun` starts on every rank for test_two_ranks.py: a list of jobs, each a config.

An error ends its job, not the list: it is written into the run folder, one file a rank.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
from known_peak import set_peak
from safetensors.torch import save_file
from torch.utils._python_dispatch import TorchDispatchMode

from deeploop.config.json import from_dict
from deeploop.config.run import DeviceConfig
from deeploop.tasks import config_class
from deeploop.train import loop, opening, steps
from deeploop.train.distributed import open_world
from deeploop.train.execution import Execution
from deeploop.train.opening import open_run
from deeploop.train.steps import StepQueue
from deeploop.train.stop import StopRequest


def gradients(config):
    """Takes one step and keeps the gradients that the optimizer was given: whole tensors, by name."""
    taken = {}

    def take(optimizer, args, kwargs):
        for name, parameter in run.model.named_parameters():
            gradient = parameter.grad
            whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
            taken[name] = whole.clone()

    with open_world(config.device) as world:
        run = open_run(config, world)
        run.optimizer.register_step_pre_hook(take)
        StepQueue(run, StopRequest()).take()
        if world.is_main:
            save_file(taken, config.out / "gradients.safetensors")


def poison(config):
    """One step with a NaN in one weight of the first rank alone."""
    with open_world(config.device) as world:
        run = open_run(config, world)
        weight = run.model.get_parameter("blocks.1.mlp.branch.up.weight")
        if world.is_main:
            with torch.no_grad():
                (weight.to_local() if hasattr(weight, "to_local") else weight)[0, 0] = float("nan")
        StepQueue(run, StopRequest()).take()


class Traffic(TorchDispatchMode):
    """Every collective's name and the bytes that this rank has in it, counted whole and not by shard."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            tensors = [
                t for a in args for t in (a if isinstance(a, list) else [a]) if isinstance(t, torch.Tensor)
            ]
            name = function._schema.name.removeprefix("c10d::").strip("_")
            self.calls.append((name, max(t.nbytes for t in tensors)))
        return function(*args, **(kwargs or {}))


def traffic(config):
    """The collectives between ranks in the second step of a run."""
    with open_world(config.device) as world:
        queue = StepQueue(open_run(config, world), StopRequest())
        queue.take()
        with Traffic() as counted:
            queue.take()
        if world.is_main:
            (config.out / "traffic.json").write_text(json.dumps(counted.calls))


def stop_one(config):
    """Asks the second rank alone to stop, in the second batch of the validation of step 4, and resumes."""
    real, shares = loop.before_batch, []

    def ask(run, stop, share):
        shares.append(share)
        stop.requested = run.step == 4 and share > 0 and run.world.rank == 1
        real(run, stop, share)

    loop.before_batch = ask
    try:
        result = loop.train(config)
    finally:
        loop.before_batch = real
    assert (result["ended"], result["step"]) == ("stopped", 4)
    assert 0 < shares[-1] < 0.5
    loop.train(replace(config, resume=True))


def late(config):
    """A run whose steps are taken by the device, and read back a step behind, as on GPUs."""
    behind = Execution("eager", chained=False, precision="fp32", graph=False, lag=1)
    real = opening.choose_execution, steps.supports_conditional_step
    opening.choose_execution, steps.supports_conditional_step = lambda *_, **__: behind, lambda _: True
    try:
        loop.train(config)
    finally:
        opening.choose_execution, steps.supports_conditional_step = real


JOBS = {
    "gradients": gradients,
    "late": late,
    "poison": poison,
    "stop_one": stop_one,
    "traffic": traffic,
    "train": loop.train,
}


def main():
    set_peak()
    with open_world(DeviceConfig(kind="cpu")) as world:
        for job in json.loads(Path(sys.argv[1]).read_text()):
            config = from_dict(config_class(job["kind"]), job["config"])
            try:
                JOBS[job["do"]](config)
            except (ValueError, FloatingPointError) as error:
                config.out.mkdir(exist_ok=True)
                (config.out / f"error-{world.rank}.txt").write_text(str(error))
            world.barrier()


if __name__ == "__main__":
    main()
