"""Opening a teacher's file, which is untrusted: size bounds, wiring, external weights, old operator sets.

Imports onnx and onnx_ir, and nothing else of the teacher tools. Start with ``load.py``; a new refusal of a hostile
file belongs in ``bounds.py`` (sizes, names) or ``model.py`` (files), which also takes weights out of a graph, so that
sessions share them.
"""
