"""Laws of what must be refused: at every place, in every layer, under every option."""

from shd_ref.conformance.laws.refusals import student, teacher

LAWS = (*teacher.LAWS, *student.LAWS)
"""The laws of both sides."""
