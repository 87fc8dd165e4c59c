"""Run transformers' own common tests of a causal language model on our class.

    python tools/transformers_tests.py CHECKOUT [pytest options]

CHECKOUT is a checkout of transformers, whose wheel does not bring the tests. Its `src` goes before what is
installed, so library and tests are of one revision.
`-k averaged` runs one of the models, `-k llama` transformers' own Llama for comparison. See docs/testing.md.
"""

import os
import sys
import unittest
from pathlib import Path

CHECKOUT = "TRANSFORMERS_CHECKOUT"


def main(arguments: list[str]) -> int:
    import pytest

    if not arguments or not (Path(arguments[0]) / "tests/test_modeling_common.py").is_file():
        print(__doc__.strip() + "\n\nCHECKOUT: has no tests/test_modeling_common.py", file=sys.stderr)
        return 2
    checkout, *options = arguments
    os.environ[CHECKOUT] = str(Path(checkout).resolve())
    return pytest.main(
        [
            __file__,
            "-c",
            os.devnull,
            "--rootdir",
            checkout,
            "-p",
            "no:cacheprovider",
            "-q",
            "-W",
            "ignore",
            *options,
        ]
    )


if CHECKOUT in os.environ:
    sys.path[:0] = [os.environ[CHECKOUT], f"{os.environ[CHECKOUT]}/src"]
    import torch
    from tests.generation.test_utils import GenerationTesterMixin
    from tests.test_configuration_common import ConfigTester
    from tests.test_modeling_common import ModelTesterMixin, ids_tensor
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel, PreTrainedConfig
    from transformers.models.auto import modeling_auto

    from deeploop.models.hf import DeepLoopConfig, DeepLoopForCausalLM, DeepLoopModel

    # By these names the mixins know which class has a loss.
    modeling_auto.MODEL_MAPPING_NAMES["deeploop"] = DeepLoopModel.__name__
    modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["deeploop"] = DeepLoopForCausalLM.__name__

    class Tester:
        """A small model, and a batch for it, as the mixins ask for them."""

        batch_size, seq_length, is_training = 13, 7, True
        vocab_size, hidden_size, num_attention_heads, max_position_embeddings = 128, 32, 2, 512
        pad_token_id, bos_token_id, eos_token_id = 0, 1, 2
        small = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2} | {
            "max_position_embeddings": 512,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }

        def __init__(self, config_class: type[PreTrainedConfig], **own: object) -> None:
            self.config_class, self.own = config_class, self.small | own
            self.num_hidden_layers = self.get_config().num_hidden_layers

        def get_config(self) -> PreTrainedConfig:
            return self.config_class(**self.own)

        def prepare_config_and_inputs_for_common(self) -> tuple[PreTrainedConfig, dict[str, torch.Tensor]]:
            ids = ids_tensor([self.batch_size, self.seq_length], self.vocab_size)
            return self.get_config(), {"input_ids": ids, "attention_mask": torch.tril(torch.ones_like(ids))}

    class Common(ModelTesterMixin, GenerationTesterMixin):
        config_class: type[PreTrainedConfig] = DeepLoopConfig
        all_model_classes = (DeepLoopModel, DeepLoopForCausalLM)
        own: dict[str, object] = {}  # noqa: RUF012

        def setUp(self) -> None:
            self.model_tester = Tester(self.config_class, **self.own)
            self.config_tester = ConfigTester(self, config_class=self.config_class, **self.own)

        def test_config(self) -> None:
            self.config_tester.run_common_tests()

    class TestDeepLoop(Common, unittest.TestCase):
        own = {"blocks": 1, "rounds": 2}  # noqa: RUF012

    class TestAveraged(Common, unittest.TestCase):
        own = {"blocks": 1, "rounds": 2, "rule": "averaged"}  # noqa: RUF012

    class TestGrouped(Common, unittest.TestCase):
        own = {"blocks": 1, "rounds": 2, "kv_heads": 1}  # noqa: RUF012

    class TestParts(Common, unittest.TestCase):
        own = {"blocks": 1, "rounds": 2, "prelude": 1, "coda": 1, "injection": "linear"}  # noqa: RUF012

    class TestLlama(Common, unittest.TestCase):
        config_class = LlamaConfig
        all_model_classes = (LlamaModel, LlamaForCausalLM)
        own = {"num_hidden_layers": 2, "num_key_value_heads": 2}  # noqa: RUF012


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
