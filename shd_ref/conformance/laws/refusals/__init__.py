"""Laws of what must be refused: at every place, in every layer, under every option.

``asking.py`` makes the call; ``teacher.py`` and ``student.py`` hold the laws of either side, ``idle.py``
those of faults under every other option. Imports the laws beside
this folder.
"""

from shd_ref.conformance.laws.refusals import idle, student, teacher

LAWS = (*teacher.LAWS, *student.LAWS, *idle.LAWS)
"""The laws of both sides, and of options that leave an argument without a use."""
