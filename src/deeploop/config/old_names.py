"""Names that version 0.2.0 wrote, and what they are called now: nothing else knows them. No torch.

There a rule was eleven fields of the model (`model.block` and its like), now it is `model.rule`. Whatever
reads a config calls `model_section`, `fields` or `settings`, as its form is; what is not old comes back as it
is. There also no recipe but the `-stable` and `-flat` ones had the unigram bias: `cell` reads a sweep's cell.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from deeploop.rules import parse

# Field → the value that it had unless it was given.
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
# What the fields are called as parameters of a rule, by the old block that had them.
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
UNUSED = (("postnorm", "inner_norm"),)  # was accepted without an effect, as scale_gate was elsewhere
NAMES = {"sandwich": "deeploop"}
BIAS = "model.unigram_bias"
WITHOUT_BIAS = ("tiny", "gpt2-small", "gpt2-medium")  # recipes that have it now
REASONERS = ("hrm", "trm")  # whose configs have fields p, flat and flat_gain still


def rule_of(old: Mapping[str, Any]) -> str:
    """The rule that these fields of 0.2.0 described; those left out had their default."""
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
    """The block that must have been meant where none is named: each field went with one block alone."""
    given = {name for name, value in old.items() if value != OLD[name]}
    if "flat_gain" in given and old.get("alpha", "paper") != "flat":
        return "flat"
    found = {"factored_gain": "factored", "epsilon_exponent": "prenorm"}
    return next((found[name] for name in found if name in given), "sandwich")


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def model_section(model: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a looped GPT's config, whatever else stands among them."""
    old = {name: value for name, value in model.items() if name in OLD}
    if not old or "rule" in model:
        return dict(model)
    kept = {name: value for name, value in model.items() if name not in OLD}
    return {**kept, "rule": rule_of(old)}


def reasoner_section(model: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a reasoner's config; 0.2.0 counted its N in the training graph."""
    scaled = model.get("p") or model.get("high_p")
    old = scaled and model.get("depth") == 0 and "depth_from" not in model
    return {**model, **({"depth_from": "graph"} if old else {})}


def current(kind: type, data: Any) -> Any:
    """The object that describes a config of this class, as the class has it now."""
    known = getattr(kind, "__dataclass_fields__", {}) if isinstance(data, dict) else {}
    if "rule" in known:
        return model_section(data)
    return reasoner_section(data) if "depth_from" in known else data


def readable(paths: Collection[str]) -> set[str]:
    """The fields of a config with the old ones that it is read from as well."""
    return {*paths, *(PATHS if "model.rule" in paths else ())}


def fields(found: Mapping[str, Any], task: object) -> dict[str, Any]:
    """A config as paths and values: {"model.p": 0.25} → {"model.rule": "deepnorm"}."""
    old = {name: value for name, value in found.items() if name in PATHS}
    if task in REASONERS and "model.depth" in found:
        own = {name.removeprefix("model."): value for name, value in found.items()}
        counted = reasoner_section(own).get("depth_from", "cycles")
        return {**found, "model.depth_from": counted}
    if not old or "model.rule" in found or task in REASONERS:
        return dict(found)
    rule = rule_of({name.removeprefix("model."): value for name, value in old.items()})
    first = next(iter(old))  # whose place it takes
    now = {("model.rule" if name == first else name): value for name, value in found.items()}
    return {name: value for name, value in now.items() if name not in PATHS} | {"model.rule": rule}


def settings(found: Mapping[str, Any], recipe: str) -> dict[str, Any]:
    """What a cell of a sweep sets in its recipe, with its rule as configs write it."""
    now = fields(found, recipe.partition("-")[0])
    rule = now.get("model.rule")
    return {**now, "model.rule": str(parse(rule, "model.rule"))} if isinstance(rule, str) else now


def cell(found: Mapping[str, Any], recipe: str) -> tuple[str, dict[str, Any]]:
    """Recipe and settings of a cell in sweep.json, with its unigram bias, which 0.2.0 left to the recipe."""
    now = settings(found, recipe)
    name, _, form = recipe.rpartition("-")
    if form in ("stable", "flat") and name in WITHOUT_BIAS:
        return name, {**({"model.rule": "flat"} if form == "flat" else {}), BIAS: True, **now}
    return recipe, {BIAS: False, **now} if recipe in WITHOUT_BIAS else now


def require_new_flags(words: Iterable[str]) -> None:
    """Raise where words of the command line are flags of 0.2.0, with what to say now."""
    old: dict[str, Any] = {}
    said = []
    rest = iter(words)
    for word in rest:
        flag, equals, value = word.partition("=")
        name = flag.removeprefix("--model.").replace("-", "_")
        on = not name.startswith("no_")
        name = name.removeprefix("no_")
        if not flag.startswith("--model.") or name not in OLD:
            continue
        if OLD[name] is True:
            old[name] = on
        else:
            value = value if equals else next(rest, "")
            old[name] = _number(value)
        said.append(word if equals or OLD[name] is True else f"{word} {value}")
    if old:
        raise ValueError(f"{' '.join(said)}: is now --model.rule {rule_of(old)}")


def _number(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return {"true": True, "false": False, "none": None}.get(text.lower(), text)
