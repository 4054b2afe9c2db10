"""Laws of ``specs/shrink.md``: merged heads, the layer's other matrices, and the predictor.

``layers`` holds attention in the judge's own words, with which answers are run. Imports the judge's files above.
"""

from shd_ref.conformance.laws.law import Law
from shd_ref.conformance.laws.shrink import heads, matrices, predictor

LAWS: tuple[Law, ...] = (*heads.LAWS, *matrices.LAWS, *predictor.LAWS)
"""Every law of the part, by chapter."""
