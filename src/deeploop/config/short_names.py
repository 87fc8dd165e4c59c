"""Short names of the fields that are set most, for all commands. Imports no torch."""

from collections.abc import Collection

# Group of --help → short name → (path of the field, value, help).
GROUPS: dict[str, dict[str, tuple[str, str, str]]] = {
    "model": {
        "rule": ("model.rule", "RULE", "residual rule: deeploop, prenorm, flat, … (docs/rules.md)"),
        "blocks": ("model.blocks", "K", "stored blocks"),
        "rounds": ("model.rounds", "R", "times that the stack of blocks is applied"),
        "width": ("model.width", "N", "width of the residual stream; heads and hidden width follow"),
        "context": ("model.context", "N", "longest sequence, in tokens"),
    },
    "training": {
        "data": ("data.path", "FOLDER", "what `deeploop prepare` wrote"),
        "steps": ("optim.steps", "N", "optimizer steps"),
        "batch": ("optim.batch", "N", "sequences in a step, over all ranks"),
        "lr": ("optim.peak_lr", "RATE", "learning rate at the end of warm-up"),
        "warmup": ("optim.warmup_steps", "N", "steps of linear warm-up"),
    },
    "run": {
        "out": ("out", "FOLDER", "run folder"),
        "device": ("device.kind", "auto|cpu|cuda", "where to compute"),
        "seed": ("seed", "N", "of the weights and of the order of the data"),
        "init-from": ("init_from", "RUN", "start from the weights of a run or an export"),
    },
}
SHORT = {name: path for group in GROUPS.values() for name, (path, *_) in group.items()}


def full_path(name: str, known: Collection[str]) -> str:
    """The path of the field with this short name among those `known`; other names are returned unchanged."""
    path = SHORT.get(name, name)
    return path if path in known else name


def full_words(words: list[str], known: Collection[str]) -> list[str]:
    """Expand the short options in words of the command line: --rounds=4 → --model.rounds=4."""

    def full(word: str) -> str:
        option, equals, value = word.partition("=")
        if not option.startswith("--"):
            return word
        path = full_path(option[2:].replace("_", "-"), known)
        return f"--{path.replace('_', '-')}{equals}{value}" if path in known else word

    return [full(word) for word in words]
