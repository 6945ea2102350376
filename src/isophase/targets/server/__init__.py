"""A model behind HTTP as a target; torch is not needed."""
