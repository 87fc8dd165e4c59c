"""Where vLLM finds the plugin: the entry point `vllm.general_plugins` calls `register` in every process."""


def register() -> None:
    """Teach transformers the config of an export, and vLLM its model, which is imported once it is needed."""
    from vllm import ModelRegistry

    import deeploop.models.hf  # noqa: F401

    ModelRegistry.register_model("DeepLoopForCausalLM", "deeploop.export.vllm:DeepLoopForCausalLM")
