"""Sparse attention over long prompts: `with sparse_prefill(model): ...`."""

from isophase.prefill.attach import sparse_prefill
from isophase.prefill.choose.adapt import Adaptive, Choice
from isophase.prefill.choose.machine import Costs, costs_of
from isophase.prefill.choose.offline import search
from isophase.prefill.choose.policy import Auto, Policy, Table
from isophase.prefill.execution.blocked import attend_blocked, attend_dense, attend_reference
from isophase.prefill.execution.engine import Settings, attend_row, execute, look, make_plan
from isophase.prefill.execution.plan import Plan, full_plan
from isophase.prefill.patterns import AShape, BlockSparse, Dense, Pattern, Reads, VerticalSlash
from isophase.prefill.patterns.file import PatternFile, parse_patterns, read_patterns
from isophase.prefill.patterns.spec import parse_pattern, write_pattern
from isophase.prefill.picture import draw_densities, head_facts, read_result, summary
from isophase.prefill.rows import attention_rows
from isophase.prefill.run import CallRun, HeadRun, PrefillRun
from isophase.prefill.sample import Geometry, HeadSample, Sampling, sample_head

__all__ = [
    "AShape",
    "Adaptive",
    "Auto",
    "BlockSparse",
    "CallRun",
    "Choice",
    "Costs",
    "Dense",
    "Geometry",
    "HeadRun",
    "HeadSample",
    "Pattern",
    "PatternFile",
    "Plan",
    "Policy",
    "PrefillRun",
    "Reads",
    "Sampling",
    "Settings",
    "Table",
    "VerticalSlash",
    "attend_blocked",
    "attend_dense",
    "attend_reference",
    "attend_row",
    "attention_rows",
    "costs_of",
    "draw_densities",
    "execute",
    "full_plan",
    "head_facts",
    "look",
    "make_plan",
    "parse_pattern",
    "parse_patterns",
    "read_patterns",
    "read_result",
    "sample_head",
    "search",
    "sparse_prefill",
    "summary",
    "write_pattern",
]
