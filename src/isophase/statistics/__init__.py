"""Is there a period, how large, how sure: pure functions on arrays, numpy and scipy only."""

from isophase.statistics.adjust import MinP, holm, min_p
from isophase.statistics.amplitude import (
    Amplitude,
    amplitude_upper,
    constant_upper,
    debiased_amplitude,
    estimate_amplitude,
    harmonic_amplitude,
    noncentrality_upper,
)
from isophase.statistics.assessment import Assessment, Reason, Verdict
from isophase.statistics.contrast import (
    BoundaryContrast,
    boundary_contrast,
    contrast_weights,
    mcnemar_p_value,
    mcnemar_pairs,
    straddling_phases,
)
from isophase.statistics.counts import (
    CountSummary,
    Spectrum,
    dominant_period,
    period_of_counts,
    spectrum,
    summarise_counts,
)
from isophase.statistics.harmonics import (
    ResidueTest,
    cochran_q,
    harmonic_shares,
    harmonic_sums,
    rayleigh,
    residue_test,
)
from isophase.statistics.intervals import (
    Gap,
    ResidueTable,
    accuracy_interval,
    cross_fitted_gap,
    table_by_residue,
    wilson,
)
from isophase.statistics.observations import Observations
from isophase.statistics.paired import PairedContrast, paired_contrast
from isophase.statistics.power import (
    detectable_amplitude,
    noncentrality,
    predicted_power,
    prompts_needed,
    prompts_to_bound,
)
from isophase.statistics.scan import (
    DEFAULT_PERIODS,
    PeriodScan,
    PeriodTest,
    attribute_period,
    extend_period,
    fits,
    scan_periods,
    without_residue_means,
)
from isophase.statistics.verdict import assess

__all__ = [
    "DEFAULT_PERIODS",
    "Amplitude",
    "Assessment",
    "BoundaryContrast",
    "CountSummary",
    "Gap",
    "MinP",
    "Observations",
    "PairedContrast",
    "PeriodScan",
    "PeriodTest",
    "Reason",
    "ResidueTable",
    "ResidueTest",
    "Spectrum",
    "Verdict",
    "accuracy_interval",
    "amplitude_upper",
    "assess",
    "attribute_period",
    "boundary_contrast",
    "cochran_q",
    "constant_upper",
    "contrast_weights",
    "cross_fitted_gap",
    "debiased_amplitude",
    "detectable_amplitude",
    "dominant_period",
    "estimate_amplitude",
    "extend_period",
    "fits",
    "harmonic_amplitude",
    "harmonic_shares",
    "harmonic_sums",
    "holm",
    "mcnemar_p_value",
    "mcnemar_pairs",
    "min_p",
    "noncentrality",
    "noncentrality_upper",
    "paired_contrast",
    "period_of_counts",
    "predicted_power",
    "prompts_needed",
    "prompts_to_bound",
    "rayleigh",
    "residue_test",
    "scan_periods",
    "spectrum",
    "straddling_phases",
    "summarise_counts",
    "table_by_residue",
    "wilson",
    "without_residue_means",
]
