"""Laws in which two options of an operation meet, or three: mistakes like to sit where options do.

Each law asks for the rows of a covering array and finds what is right by itself; ``specs/pairs.md`` has the options.
``rows.py`` draws the arrays; one file a chapter. Imports the laws beside this folder.
"""

from shd_ref.conformance.laws.pairs import alphas, maps, merging, plans, triples

LAWS = (*maps.LAWS, *plans.LAWS, *alphas.LAWS, *merging.LAWS, *triples.LAWS)
"""The laws of all chapters of the teacher's side."""
