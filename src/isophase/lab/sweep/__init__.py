"""Many matched runs: the grid of a sweep file, the engines that run it, the table that comes out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from isophase.lazy import lazily

if TYPE_CHECKING:
    from isophase.lab.sweep.cluster import run_on_ray
    from isophase.lab.sweep.grid import open_folder, read_sweep, run_local
    from isophase.lab.sweep.report import markdown, write_tables

__all__ = ["markdown", "open_folder", "read_sweep", "run_local", "run_on_ray", "write_tables"]

__getattr__, __dir__ = lazily(__name__, __file__)
