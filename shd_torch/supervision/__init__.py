"""What a student is taught with: dense maps, codes of a cache, or the teacher's queries and keys.

``supervision.py`` is the interface; bytes become maps in ``coded.py`` and ``factored_codes.py``; ``mask.py`` says who
may attend. Imports ``maps``.
"""
