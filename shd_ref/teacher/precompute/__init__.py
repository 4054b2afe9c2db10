"""From a running teacher to a cache: manifest, comparison with the reference, records, shards, several students.

``engine.py`` is the way in, ``job.py`` the loop over batches; ``ray_engine.py`` deals the same shards on a cluster.
Imports ``run`` and ``shd_ref.cache``.
"""
