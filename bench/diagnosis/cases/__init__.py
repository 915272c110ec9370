"""81 training steps that people reported (CASES), and ten that were held out (FRESH)."""

from bench.diagnosis.cases import (
    backward,
    data,
    divergence,
    exotic,
    fresh,
    half,
    lawful,
    state,
)
from bench.diagnosis.step import cases_of

CASES = {}
for kind in (backward, half, data, state, divergence, lawful, exotic):
    CASES |= cases_of(kind)
FRESH = cases_of(fresh)
