"""Recipes: named functions that return a full config. Any field can be overridden on the command line."""

from collections.abc import Callable

from deeploop.config.run import RunConfig
from deeploop.tasks.chat import recipes as chat
from deeploop.tasks.iterate import recipes as iterate
from deeploop.tasks.language import recipes as gpt
from deeploop.tasks.puzzles import recipes as puzzles

RECIPES: dict[str, Callable[[], RunConfig]] = {
    "gpt2-small": gpt.gpt2_small,
    "gpt2-medium": gpt.gpt2_medium,
    "tiny": gpt.tiny,
    "tiny-recurrent": gpt.tiny_recurrent,
    "huginn-small": gpt.huginn_small,
    "parcae-small": gpt.parcae_small,
    "ouro-small": gpt.ouro_small,
    "chat": chat.chat,
    "hrm-arc1": puzzles.hrm_arc1,
    "hrm-arc1-deeploop": puzzles.hrm_arc1_deeploop,
    "trm-arc1": puzzles.trm_arc1,
    "hrm-sudoku": puzzles.hrm_sudoku,
    "trm-sudoku": puzzles.trm_sudoku,
    "hrm-maze": puzzles.hrm_maze,
    "hrm-sudoku4": puzzles.hrm_sudoku4,
    "hrm-sudoku4-deeploop": puzzles.hrm_sudoku4_deeploop,
    "trm-sudoku4": puzzles.trm_sudoku4,
    "automaton": iterate.automaton,
    "automaton-stack": iterate.automaton_stack,
    "hops": iterate.hops,
    "induction": iterate.induction,
    "addition": iterate.addition,
    "reachability": iterate.reachability,
}


# Recipes that were removed, and the command-line arguments that replace them.
GONE = {
    f"{name}-{suffix}": f"{name}{option}"
    for name in ("tiny", "gpt2-small", "gpt2-medium")
    for suffix, option in (("stable", ""), ("flat", " --rule flat"))
}


def get_recipe(name: str) -> RunConfig:
    require_recipe(name)
    return RECIPES[name]()


def require_recipe(name: str) -> None:
    """Raise ValueError unless a recipe has this name; name the replacement of a removed one."""
    if name in GONE:
        raise ValueError(
            f"recipe={name}: was removed, as all recipes have the unigram bias; "
            f"use `deeploop train {GONE[name]}`"
        )
    if name not in RECIPES:
        raise ValueError(f"recipe={name}: unknown; choose one of {', '.join(RECIPES)}")
