"""vLLM's plugin: the entry point `vllm.general_plugins` calls `register` in every process."""

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig

NAME = "DeepLoopForCausalLM"
OLDEST = "0.32"
STORED = ("auto_map", "tokenizer_class", "quantization_config")  # that other configs may have


def register() -> None:
    """Teach transformers the config of an export, and vLLM its model, which is imported once it is needed.

    An older vLLM is left alone, with a warning: it may be serving other models.
    """
    import vllm
    from packaging.version import Version

    if Version(vllm.__version__) < Version(OLDEST):
        logging.getLogger(__name__).warning(
            "vllm==%s: deeploop's plugin needs %s or newer; pip install --upgrade vllm",
            vllm.__version__,
            OLDEST,
        )
        return
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP, VerifyAndUpdateConfig

    import deeploop.models.hf  # noqa: F401

    class Served(VerifyAndUpdateConfig):
        """vLLM's check of a config: refuse unsupported settings before the engine's processes start."""

        @staticmethod
        def verify_and_update_config(vllm_config: "VllmConfig") -> None:
            require_served(vllm_config)

    MODELS_CONFIG_MAP[NAME] = Served
    vllm.ModelRegistry.register_model(NAME, f"deeploop.export.vllm:{NAME}")


def require_served(vllm_config: "VllmConfig") -> None:
    """Raise where the model or the engine's settings need what the plugin does not compute."""
    config, parallel = vllm_config.model_config.hf_config, vllm_config.parallel_config
    overrides = vllm_config.model_config.hf_overrides
    if isinstance(overrides, dict):
        settings = type(config)()
        for name in overrides:
            method = callable(getattr(settings, name, None))
            if name not in STORED and (method or not hasattr(settings, name)):
                raise ValueError(
                    f"hf_overrides: {name} is not a setting of this model; rounds sets the depth"
                )
    replace(config.to_gpt(), rounds=config.rounds)  # which checks them
    if config.exit_gate:
        raise ValueError("exit_gate=True: vLLM runs all rounds for every token; export a run without a gate")
    if config.cache_rounds is not None and config.cache_rounds < config.rounds:
        raise ValueError(
            f"cache_rounds={config.cache_rounds}: vLLM keeps all rounds; export without --cache-rounds"
        )
    for name, size in (
        ("tensor_parallel_size", parallel.tensor_parallel_size),
        ("pipeline_parallel_size", parallel.pipeline_parallel_size),
    ):
        if size > 1:
            raise ValueError(f"{name}={size}: must be 1; run replicas")
    if vllm_config.quant_config is not None:
        raise ValueError(
            f"quantization={vllm_config.model_config.quantization}: must be unset; use bfloat16 weights"
        )
