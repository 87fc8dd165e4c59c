"""Runs in which something happens at a step: they are asked to stop, or the model is broken."""

from deeploop.tasks import task_class
from deeploop.train.loop import train
from deeploop.train.stop import StopRequest


def acting(config, step, do, kind=None):
    """A task for `train(config, task=…)`: do(model) is called once, as step number `step` (from 1) begins."""

    class Acting(kind or task_class(config.task)):
        pending = True

        def build(self):
            self.built = super().build()
            return self.built

        def batches(self, done):
            if self.pending and done == step - 1:
                self.pending = False
                do(self.built)
            return super().batches(done)

    return Acting


def stopped_in(step, config, kind=None):
    """The result of a run that is asked to stop in this step."""
    stop = StopRequest()

    def ask(model):
        stop.requested = True

    return train(config, task=acting(config, step, ask, kind), stop=stop)


def stopped_in_evaluation(number, config):
    """The result of a run that is asked to stop after a batch of its evaluation `number` (from 0).

    Beside it are the shares of that evaluation that were done when a batch began.
    """
    stop, shares = StopRequest(), []

    class Asking(task_class(config.task)):
        evaluations = 0

        def evaluate(self, model, on_batch):
            asked = self.evaluations == number
            self.evaluations += 1

            def before(share):
                if asked:
                    shares.append(share)
                    stop.requested = len(shares) > 1
                on_batch(share)

            return super().evaluate(model, before)

    return train(config, task=Asking, stop=stop), shares
