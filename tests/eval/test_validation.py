"""Validation: the loss of a plain reference, whatever the batch, and a model left as it was."""

import pytest
import torch
import torch.nn.functional as F

from deeploop.diagnose.collapse import token_similarity
from deeploop.eval.validation import validate
from deeploop.models.gpt import LoopedGPT
from deeploop.models.gpt_config import GPTConfig


@pytest.fixture(scope="module")
def model():
    return LoopedGPT(
        GPTConfig(blocks=2, rounds=2, width=32, heads=2, hidden=64, vocabulary=100, context=16), seed=3
    )


@pytest.fixture(scope="module")
def windows():
    tokens = torch.randint(100, (7, 17), generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def test_it_is_the_cross_entropy_over_the_real_vocabulary(model, windows):
    inputs, targets = windows
    logits = model.logits(model(inputs).states)
    assert logits.shape[-1] == 100  # the 28 padded words take no part
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum").item()
    result = validate(model, inputs, targets, batch=3)
    assert result.targets == targets.numel()
    assert result.loss == pytest.approx(expected, rel=1e-6)


def test_the_batch_does_not_change_the_loss(model, windows):
    losses = [validate(model, *windows, batch=batch).loss for batch in (1, 2, 7, 50)]
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-6)


def test_uncounted_targets_are_left_out(model, windows):
    inputs, targets = windows
    half = targets.clone()
    half[4:] = -100
    whole = validate(model, inputs[:4], targets[:4], batch=4)
    found = validate(model, inputs, half, batch=4)
    assert found.targets == whole.targets
    assert found.loss == pytest.approx(whole.loss, rel=1e-6)


def test_similarity_is_that_of_the_first_batch(model, windows):
    inputs, _ = windows
    assert validate(model, *windows, batch=3).similarity == token_similarity(model(inputs[:3]).states)


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_left_as_it_was(model, windows, training):
    model.train(training)
    seen = []
    hook = model.register_forward_hook(lambda module, *_: seen.append(module.training))
    validate(model, *windows, batch=4)
    hook.remove()
    assert seen == [False, False]
    assert model.training == training
    assert all(parameter.grad is None for parameter in model.parameters())
