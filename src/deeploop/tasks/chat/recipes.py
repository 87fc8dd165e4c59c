"""The recipe for fine-tuning on conversations."""

from pathlib import Path

from deeploop.config.optim import OptimConfig
from deeploop.config.run import CheckpointConfig, LogConfig
from deeploop.tasks.chat.config import ChatDataConfig, ChatTrainConfig


def chat() -> ChatTrainConfig:
    """Fine-tune a run (--init-from) on conversations, with that run's model settings."""
    return ChatTrainConfig(
        out=Path("runs/chat"),
        data=ChatDataConfig(),
        optim=OptimConfig(
            steps=500, batch=32, peak_lr=1e-4, floor_lr=1e-5, warmup_steps=50, weight_decay=0.0
        ),
        checkpoint=CheckpointConfig(every=100),
        log=LogConfig(every=5),
    )
