"""Laws of what must be refused: at every place, in every layer, under every option.

``asking.py`` makes the call; ``teacher.py`` and ``student.py`` hold the laws of either side. Imports the laws beside
this folder.
"""

from shd_ref.conformance.laws.refusals import student, teacher

LAWS = (*teacher.LAWS, *student.LAWS)
"""The laws of both sides."""
