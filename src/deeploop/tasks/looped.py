"""Checks shared by the tasks that train a looped GPT."""

from deeploop.config.optim import OptimConfig
from deeploop.config.run import DeviceConfig
from deeploop.models.gpt_config import GPTConfig


def check_optim(model: GPTConfig, optim: OptimConfig, device: DeviceConfig) -> None:
    """Raise ValueError if the optimizer does not suit the model or its ranks."""
    if optim.injection_lr != 1 and model.injection in ("none", "add"):
        raise ValueError(
            f"optim.injection_lr={optim.injection_lr}: must be 1 with model.injection={model.injection}, "
            "which has no weights"
        )
    if optim.kind == "muon" and device.parallel == "fsdp":
        raise ValueError(
            "optim.kind=muon: must be adamw with device.parallel=fsdp, where no rank has a whole matrix; "
            "or use device.parallel=ddp"
        )
    if optim.kind == "muon" and model.mup_base_width:
        raise ValueError(
            f"optim.kind=muon: must be adamw with model.mup_base_width={model.mup_base_width}, "
            "whose rate over widths is Adam's; or set that to 0"
        )
