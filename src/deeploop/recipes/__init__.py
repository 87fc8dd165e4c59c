"""Recipes: named functions that return a full config. Any field can be overridden on the command line."""

from collections.abc import Callable

from deeploop.recipes import chat, gpt, iterated, reasoners, recurrent
from deeploop.train.config import AnyTrainConfig

RECIPES: dict[str, Callable[[], AnyTrainConfig]] = {
    "gpt2-small": gpt.gpt2_small,
    "gpt2-medium": gpt.gpt2_medium,
    "tiny": gpt.tiny,
    "tiny-recurrent": recurrent.tiny_recurrent,
    "huginn-small": recurrent.huginn_small,
    "parcae-small": recurrent.parcae_small,
    "ouro-small": recurrent.ouro_small,
    "gpt2-small-stable": gpt.gpt2_small_stable,
    "gpt2-medium-stable": gpt.gpt2_medium_stable,
    "tiny-stable": gpt.tiny_stable,
    "gpt2-small-flat": gpt.gpt2_small_flat,
    "gpt2-medium-flat": gpt.gpt2_medium_flat,
    "tiny-flat": gpt.tiny_flat,
    "chat": chat.chat,
    "hrm-arc1": reasoners.hrm_arc1,
    "hrm-arc1-deeploop": reasoners.hrm_arc1_deeploop,
    "trm-arc1": reasoners.trm_arc1,
    "hrm-sudoku": reasoners.hrm_sudoku,
    "trm-sudoku": reasoners.trm_sudoku,
    "hrm-maze": reasoners.hrm_maze,
    "hrm-sudoku4": reasoners.hrm_sudoku4,
    "hrm-sudoku4-deeploop": reasoners.hrm_sudoku4_deeploop,
    "trm-sudoku4": reasoners.trm_sudoku4,
    "automaton": iterated.automaton,
    "automaton-stack": iterated.automaton_stack,
    "hops": iterated.hops,
    "induction": iterated.induction,
    "addition": iterated.addition,
    "reachability": iterated.reachability,
}


def get_recipe(name: str) -> AnyTrainConfig:
    if name not in RECIPES:
        raise ValueError(f"recipe={name}: unknown; choose one of {', '.join(RECIPES)}")
    return RECIPES[name]()
