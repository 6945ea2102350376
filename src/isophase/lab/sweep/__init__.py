"""Many matched runs: the grid of a sweep file, the engines that run it, the table that comes out."""
