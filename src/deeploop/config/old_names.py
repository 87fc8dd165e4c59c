"""Read the names that version 0.2.0 wrote; no other module knows them. Imports no torch.

In 0.2.0 a rule was eleven fields of the model (`model.block` and others) instead of `model.rule`, and the
optimizer had fields against the unigram collapse, which were removed. Whoever reads a config calls `current`,
`fields` or `settings`, depending on its form; new configs are returned unchanged. Only the recipes `*-stable`
and `*-flat` had the unigram bias: `cell` reads a sweep's cell.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from deeploop.rules import parse

# Fields and their default values.
OLD: dict[str, Any] = {
    "block": "sandwich",
    "p": 0.5,
    "alpha": "paper",
    "beta": "on",
    "outer_gain": True,
    "flat_gain": 1.0,
    "factored_gain": 1.0,
    "inner_norm": True,
    "scale_gate": True,
    "shrink_outputs": None,
    "epsilon_exponent": 0.0,
}
PATHS = frozenset(f"model.{name}" for name in OLD)
# Names of the fields as parameters of a rule, by the block that had them.
PARAMETERS = {
    "sandwich": {
        **{name: name for name in ("p", "alpha", "beta", "outer_gain", "inner_norm")},
        **{"flat_gain": "gain", "scale_gate": "gate"},
    },
    "flat": {"flat_gain": "gain"},
    "factored": {"factored_gain": "gain"},
    "prenorm": {"epsilon_exponent": "q"},
    "postnorm": {},
    "averaged": {},
}
UNUSED = (("postnorm", "inner_norm"),)  # accepted without an effect, as scale_gate was with other blocks
NAMES = {"sandwich": "deeploop"}
BIAS = "model.unigram_bias"
WITHOUT_BIAS = ("tiny", "gpt2-small", "gpt2-medium")  # recipes that have it now
REASONERS = ("hrm", "trm")  # whose rule was an exponent, 0 for the published block, or the flat rule
REASONER_RULE: dict[str, Any] = {"p": 0.0, "flat": False, "flat_gain": 1.0, "high_p": None}
REASONER_PATHS = [f"model.{name}" for name in (*REASONER_RULE, "depth", "depth_from", "rule", "high_rule")]
# Fields of `optim` that were removed, and the values without an effect.
REMOVED: dict[str, Any] = {"branch_lr": 1.0, "branch_release_steps": 0, "wait_for_escape": False}
REMOVED_PATHS = {f"optim.{name}": value for name, value in REMOVED.items()}
INSTEAD = "use --model.unigram-bias (docs/escape.md)"


def rule_of(old: Mapping[str, Any]) -> str:
    """The rule that these fields of 0.2.0 describe; absent ones have their default."""
    block = old.get("block") or _block_with(old)
    if not isinstance(block, str) or block not in PARAMETERS:
        raise ValueError(f"model.block={block!r:.80}: must be one of {', '.join(PARAMETERS)}")
    known = {**PARAMETERS[block], "shrink_outputs": "shrink"}
    given = {name: value for name, value in old.items() if name != "block" and value != OLD[name]}
    for name, value in given.items():
        if name not in known and (block, name) not in UNUSED and name != "scale_gate":
            raise ValueError(f"model.{name}={value!r:.80}: must be {OLD[name]} with model.block={block}")
    own = [f"{known[name]}={_text(value)}" for name, value in given.items() if name in known]
    return str(parse(":".join(filter(None, [NAMES.get(block, block), ",".join(own)])), "model.rule"))


def _block_with(old: Mapping[str, Any]) -> str:
    """The block implied by the other fields: each of them belonged to one block."""
    given = {name for name, value in old.items() if value != OLD[name]}
    if "flat_gain" in given and old.get("alpha", "paper") != "flat":
        return "flat"
    block_of = {"factored_gain": "factored", "epsilon_exponent": "prenorm"}
    return next((block_of[name] for name in block_of if name in given), "sandwich")


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def model_section(model: Mapping[str, Any]) -> dict[str, Any]:
    """The current fields of a looped GPT's config."""
    old = {name: value for name, value in model.items() if name in OLD}
    if not old or "rule" in model:
        return dict(model)
    kept = {name: value for name, value in model.items() if name not in OLD}
    return {**kept, "rule": rule_of(old)}


def reasoner_section(model: Mapping[str, Any]) -> dict[str, Any]:
    """The current fields of a reasoner's config; 0.2.0 counted its N in the training graph."""
    own = {name: value for name, value in model.items() if name not in REASONER_RULE}
    if any(name in model for name in REASONER_RULE if name != "high_p"):
        own["rule"] = _reasoner_rule(model)
    if "high_p" in model:
        own["high_rule"] = "" if model["high_p"] is None else _of_exponent(model["high_p"], "high_rule")
    scaled = model.get("p") or model.get("high_p")
    if scaled and model.get("depth") == 0 and "depth_from" not in model:
        own["depth_from"] = "graph"
    return own


def _reasoner_rule(model: Mapping[str, Any]) -> str:
    if not model.get("flat"):
        return _of_exponent(model.get("p", 0.0), "rule")
    gain = model.get("flat_gain", 1.0)
    return str(parse("flat" if gain == 1 else f"flat:gain={gain}", "model.rule"))


def _of_exponent(p: Any, field: str) -> str:
    return str(parse(f"deeploop:p={p}", f"model.{field}")) if p else "postnorm"


def current(kind: type, data: Any) -> Any:
    """The object that describes a config of this class, with its current fields."""
    known = getattr(kind, "__dataclass_fields__", {}) if isinstance(data, dict) else {}
    if "depth_from" in known:
        return reasoner_section(data)
    if "injection_lr" in known:
        return {name: value for name, value in data.items() if name not in REMOVED}
    return model_section(data) if "rule" in known else data


def require_supported(config: Mapping[str, Any], where: str, instead: str = INSTEAD) -> None:
    """Raise ValueError for a config that uses a removed option, as it can't be trained."""
    optim = config.get("optim")
    for name, value in optim.items() if isinstance(optim, Mapping) else ():
        if name in REMOVED and value != REMOVED[name]:
            raise ValueError(f"{where}optim.{name}={value!r:.80}: was removed; {instead}")


def readable(paths: Collection[str]) -> set[str]:
    """The fields of a config, with the old ones that it can be read from."""
    if "model.depth_from" in paths:
        return {*paths, *REASONER_PATHS}
    rule = PATHS if "model.rule" in paths else ()
    return {*paths, *rule, *(REMOVED_PATHS if "optim.injection_lr" in paths else ())}


def fields(config: Mapping[str, Any], task: object) -> dict[str, Any]:
    """Convert a config as paths and values: {"model.p": 0.25} → {"model.rule": "deepnorm"}.

    Removed options without an effect are dropped; others are kept, as they distinguish runs.
    """
    if task in REASONERS:
        own = {name.removeprefix("model."): value for name, value in config.items() if name in REASONER_PATHS}
        others = {name: value for name, value in config.items() if name not in REASONER_PATHS}
        now = reasoner_section(own)
        if "depth" in now:
            now.setdefault("depth_from", "cycles")
        return others | {f"model.{name}": value for name, value in now.items()}
    unused = {name for name, value in REMOVED_PATHS.items() if config.get(name) == value}
    config = {name: value for name, value in config.items() if name not in unused}
    old = {name: value for name, value in config.items() if name in PATHS}
    if not old or "model.rule" in config:
        return dict(config)
    rule = rule_of({name.removeprefix("model."): value for name, value in old.items()})
    first = next(iter(old))  # whose position it takes
    renamed = {("model.rule" if name == first else name): value for name, value in config.items()}
    return {name: value for name, value in renamed.items() if name not in PATHS} | {"model.rule": rule}


def settings(changes: Mapping[str, Any], recipe: str) -> dict[str, Any]:
    """The settings of a sweep's cell on top of its recipe, with the rule in its current form."""
    now = fields(changes, recipe.partition("-")[0])
    rule = now.get("model.rule")
    return {**now, "model.rule": str(parse(rule, "model.rule"))} if isinstance(rule, str) else now


def cell(changes: Mapping[str, Any], recipe: str) -> tuple[str, dict[str, Any]]:
    """Recipe and settings of a cell in sweep.json, with its unigram bias, which 0.2.0 left to the recipe."""
    now = settings(changes, recipe)
    name, _, form = recipe.rpartition("-")
    if form in ("stable", "flat") and name in WITHOUT_BIAS:
        return name, {**({"model.rule": "flat"} if form == "flat" else {}), BIAS: True, **now}
    return recipe, {BIAS: False, **now} if recipe in WITHOUT_BIAS else now


def require_new_flags(words: Iterable[str], task: str = "language") -> None:
    """Raise ValueError for command-line flags of 0.2.0, naming their replacement."""
    known = REASONER_RULE if task in REASONERS else OLD
    old: dict[str, Any] = {}
    said = []
    rest = iter(words)
    for word in rest:
        flag, equals, value = word.partition("=")
        if flag.removeprefix("--").replace("-", "_").replace(".no_", ".") in REMOVED_PATHS:
            raise ValueError(f"{flag}: was removed; {INSTEAD}")
        name = flag.removeprefix("--model.").replace("-", "_")
        on = not name.startswith("no_")
        name = name.removeprefix("no_")
        if not flag.startswith("--model.") or name not in known:
            continue
        if isinstance(known[name], bool):
            old[name] = on
        else:
            value = value if equals else next(rest, "")
            old[name] = _number(value)
        said.append(word if equals or isinstance(known[name], bool) else f"{word} {value}")
    if old:
        now = reasoner_section(old) if known is REASONER_RULE else {"rule": rule_of(old)}
        flags = (
            f"--{'' if name == 'rule' else 'model.'}{name.replace('_', '-')} {value}"
            for name, value in now.items()
        )
        raise ValueError(f"{' '.join(said)}: is now {' '.join(flags)}")


def _number(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return {"true": True, "false": False, "none": None}.get(text.lower(), text)
