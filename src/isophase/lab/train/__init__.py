"""Train one model from a recipe: what a recipe says, the data, the step, the run and its folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

from isophase.lazy import lazily

if TYPE_CHECKING:
    from isophase.lab.train.recipe import Recipe, read_recipe
    from isophase.lab.train.run import Cadence, train

__all__ = ["Cadence", "Recipe", "read_recipe", "train"]

__getattr__, __dir__ = lazily(__name__, __file__)
