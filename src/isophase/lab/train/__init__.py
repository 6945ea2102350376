"""Train one model from a recipe: what a recipe says, the data, the step, the run and its folder."""
